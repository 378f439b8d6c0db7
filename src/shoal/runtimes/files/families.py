"""The families of the runtimes that take files, by name: what a catalog entry may say.

Owns the names and a line about each. Imports nothing, so that the catalog's checks can read it.
"""

from __future__ import annotations

ABOUT = {
    "ocr": "lines of text on images and PDF pages: PP-OCR's three graphs, in ONNX",
    "layout": "regions of images and PDF pages: PicoDet detectors, in ONNX",
    "image_classifier": "classes of images: a graph over pixels, in ONNX",
    "file_type": "what kind of file it is: Magika's graph over first and last bytes, in ONNX",
    "vad": "where a sound has speech in it: Silero's graph, in ONNX",
}
