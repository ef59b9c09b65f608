"""HTML pages with PNG pictures, read back."""

import base64
import html.parser
import struct
import zlib

import torch


class Page(html.parser.HTMLParser):
    """Elements with their attributes, what is in each figure, and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.figures, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "figure":
            self.figures.append({"class": dict(attrs)["class"], "text": "", "images": []})
        if tag == "img":
            self.figures[-1]["images"].append(dict(attrs))
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "figure" in self.open:
            self.figures[-1]["text"] += data


def decoded(uri):
    """The palette indices and the palette of a PNG file in a data URI."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(name + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        chunks[name], at = body, at + 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:], torch.frombuffer(bytearray(chunks[b"PLTE"]), dtype=torch.uint8).view(-1, 3)
