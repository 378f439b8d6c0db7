"""Documents as pictures: an image is one page, a PDF has many.

Owns telling them apart and how finely they are drawn. Imports its libraries when a document is
read, not before. Does not own pictures (`images`) or what is found on a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidRequest
from shoal.runtimes.images import read_image
from shoal.wire.media import MAX_PAGES, sniff

if TYPE_CHECKING:
    from PIL.Image import Image

# Enough for small print, and a page of A4 stays at two megapixels.
DOTS_PER_INCH = 150
_POINTS_PER_INCH = 72
# A page may claim to be metres wide; it is drawn smaller then.
_LONGEST_SIDE_PX = 4_096


def pages(blob: bytes) -> Iterator[Image]:
    """Each page of an image or PDF as RGB, drawn one at a time, in order.

    Raises `InvalidRequest` for bytes that are neither, and for a PDF that is broken, encrypted,
    without a page, or with more than `MAX_PAGES`.
    """
    if sniff(blob).kind != "pdf":
        yield read_image(blob)
        return
    with _opened(blob) as document:
        for number in range(len(document)):
            yield _drawn(document, number)


@contextmanager
def _opened(blob: bytes) -> Iterator[Any]:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(blob)
    except pypdfium2.PdfiumError as error:
        # The library's code may be that of a document before; one that is encrypted says so itself.
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD and b"/Encrypt" in blob:
            raise InvalidRequest("the PDF is encrypted; send it without a password") from error
        raise InvalidRequest(f"the PDF is broken: {error}") from error
    with document:
        count = len(document)
        if count < 1:
            raise InvalidRequest("the PDF has no page")
        if count > MAX_PAGES:
            raise InvalidRequest(
                f"the PDF has {count} pages, and at most {MAX_PAGES} are read; send it in parts"
            )
        yield document


def _drawn(document: Any, number: int) -> Image:
    import pypdfium2

    try:
        page = document[number]
        longest_points = max(page.get_size())
        scale = min(DOTS_PER_INCH / _POINTS_PER_INCH, _LONGEST_SIDE_PX / max(1.0, longest_points))
        bitmap = page.render(scale=scale)
        image: Image = bitmap.to_pil().convert("RGB")
    except pypdfium2.PdfiumError as error:
        raise InvalidRequest(f"page {number + 1} of the PDF is broken: {error}") from error
    bitmap.close()
    page.close()
    return image
