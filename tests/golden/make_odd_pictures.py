#!/usr/bin/env python3
"""Small PNG and JPEG files of every kind that people have, and what Pillow makes of them.

    venv/bin/pip install pillow && venv/bin/python tests/golden/make_odd_pictures.py

Writes images/odd.json: {name: {file (hex), width, height, rgb (hex), bound}}. rgb is what transformers' load_image gives
its processors: turned as EXIF says, then convert("RGB"). bound: the largest difference that another decoder may make.
Left out is grey of 16 bits, whose values above 255 Pillow makes white.
"""

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

WIDTH, HEIGHT = 13, 7
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
rng = np.random.default_rng(7)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def packed(samples, bits):
    """[height, columns] of so many bits each, rows of bytes behind a filter of none."""
    out = b""
    for row in samples:
        if bits == 16:
            out += b"\0" + row.astype(">u2").tobytes()
        else:
            ones = (row[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.uint8)
            out += b"\0" + np.packbits(ones.reshape(-1)).tobytes()
    return out


def png(samples, bits, color, interlaced=False, before=b"", behind=b"", size=None):
    """samples: [height, width, channels]"""
    height, width = samples.shape[:2]
    if interlaced:
        parts = [samples[y::dy, x::dx] for x, y, dx, dy in ADAM7]
        data = b"".join(packed(p.reshape(p.shape[0], -1), bits) for p in parts if p.size)
    else:
        data = packed(samples.reshape(height, -1), bits)
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, int(interlaced))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + chunk(b"IDAT", zlib.compress(data)) + behind +
            chunk(b"IEND", b""))


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def pngs():
    grey, alpha, rgb, rgba, palette = 0, 4, 2, 6, 3
    noise = lambda channels, bits: rng.integers(0, 1 << bits, (HEIGHT, WIDTH, channels))
    out = {}
    for bits in (1, 2, 4, 8):
        for interlaced in (False, True):
            name = f"{bits}{'-interlaced' if interlaced else ''}.png"
            out["grey" + name] = png(noise(1, bits), bits, grey, interlaced)
            colors = chunk(b"PLTE", rng.integers(0, 256, 3 << bits, dtype=np.uint8).tobytes())
            out["palette" + name] = png(noise(1, bits), bits, palette, interlaced, colors)
    few = chunk(b"PLTE", bytes(range(30, 75)))
    out["palette-transparent.png"] = png(noise(1, 4) % 15, 4, palette, before=few + chunk(b"tRNS", bytes(range(0, 150, 15))))
    out["palette-one-transparent.png"] = png(noise(1, 4) % 15, 4, palette, before=few + chunk(b"tRNS", b"\xff\xff\0"))
    out["grey-transparent.png"] = png(noise(1, 2), 2, grey, before=chunk(b"tRNS", b"\0\1"))
    out["grey-alpha.png"] = png(noise(2, 8), 8, alpha)
    out["grey-alpha16.png"] = png(noise(2, 16), 16, alpha, True)
    out["rgb.png"] = png(noise(3, 8), 8, rgb, True)
    out["rgb-transparent.png"] = png(noise(3, 8), 8, rgb, before=chunk(b"tRNS", b"\0\1\0\2\0\3"))
    out["rgb16.png"] = png(noise(3, 16), 16, rgb)
    out["rgba.png"] = png(noise(4, 8), 8, rgba)
    out["rgba16.png"] = png(noise(4, 16), 16, rgba, True)
    # Two frames: the first is the picture.
    frame = lambda n: chunk(b"fcTL", struct.pack(">IIIIIHHBB", n, WIDTH, HEIGHT, 0, 0, 1, 10, 0, 0))
    more = zlib.compress(packed(noise(3, 8).reshape(HEIGHT, -1), 8))
    out["animated.png"] = png(noise(3, 8), 8, rgb, before=chunk(b"acTL", struct.pack(">II", 2, 0)) + frame(0),
                              behind=frame(1) + chunk(b"fdAT", struct.pack(">I", 2) + more))
    for orientation in range(1, 9):
        out[f"turned{orientation}.png"] = png(noise(3, 8), 8, rgb,
                                              before=chunk(b"eXIf", exif_of(orientation).tobytes()[6:]))
    out["turned-behind.png"] = png(noise(3, 8), 8, rgb, behind=chunk(b"eXIf", exif_of(8).tobytes()[6:]))
    out["text.png"] = png(noise(3, 8), 8, rgb, before=chunk(b"tEXt", b"Comment\0x") + chunk(b"iCCP", b"x\0\0" + zlib.compress(b"no")))
    return out


def jpegs():
    y, x = np.mgrid[0:22, 0:35]
    smooth = np.stack([127 + 90 * np.sin(x / 9), 60 + 5 * y, 200 - 4 * x, 20 + 6 * y], -1).clip(0, 255).astype(np.uint8)
    out = {}

    def save(name, picture, **options):
        to = io.BytesIO()
        picture.save(to, "JPEG", quality=90, **options)
        out[name] = to.getvalue()

    rgb, inks = Image.fromarray(smooth[..., :3]), Image.fromarray(smooth, "CMYK")
    save("grey.jpg", rgb.convert("L"))
    for way in ("4:4:4", "4:2:2", "4:2:0"):
        save(f"rgb-{way.replace(':', '')}.jpg", rgb, subsampling=way)
    save("progressive.jpg", rgb, progressive=True)
    save("restarts.jpg", rgb, restart_marker_blocks=1)
    save("kept-rgb.jpg", rgb, keep_rgb=True)
    save("cmyk.jpg", inks)
    save("cmyk-progressive.jpg", inks, progressive=True)
    at = out["cmyk.jpg"].index(b"Adobe")
    ycck = bytearray(out["cmyk.jpg"])
    ycck[at + 11] = 2
    out["ycck.jpg"] = bytes(ycck)
    out["cmyk-plain.jpg"] = out["cmyk.jpg"][:at - 4] + out["cmyk.jpg"][at + 12:]  # says nothing of inks
    for orientation in (3, 6, 8):
        save(f"turned{orientation}.jpg", rgb, exif=exif_of(orientation))
    save("cmyk-turned.jpg", inks, exif=exif_of(5))
    return out


def main():
    out = {}
    for name, data in (pngs() | jpegs()).items():
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        rgb = np.asarray(picture.convert("RGB"))
        bound = 0 if name.endswith(".png") else 3
        out[name] = {"file": data.hex(), "width": rgb.shape[1], "height": rgb.shape[0], "rgb": rgb.tobytes().hex(),
                     "bound": bound}
    path = Path(__file__).parent / "images" / "odd.json"
    path.write_text(json.dumps(out, indent=0) + "\n")
    print(path, len(out), "pictures,", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
