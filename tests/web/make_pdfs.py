"""Writes PDFs of other makes for the test of the page: pikepdf (QPDF) rewrites one that a browser printed.

    python make_pdfs.py FOLDER [PRINTED.pdf]
"""

import sys
from pathlib import Path

import pikepdf

SIMPLE = (b"BT /F1 12 Tf 14 TL 72 720 Td (Caf\\351 \\(au lait\\)) Tj T* [(Ke) -20 (rning) -400 (apart)] TJ "
          b"0 -28 Td (fi: \\001 \\002) Tj ET")


def simple(folder):
    """Fonts that need not be embedded, names of glyphs for codes, a form, a page that inherits, a revision appended."""
    pdf = pikepdf.new()
    font = pikepdf.Dictionary(Type=pikepdf.Name.Font, Subtype=pikepdf.Name.Type1, BaseFont=pikepdf.Name.Helvetica,
                              Encoding=pikepdf.Dictionary(BaseEncoding=pikepdf.Name.WinAnsiEncoding,
                                                          Differences=[1, pikepdf.Name.fi, pikepdf.Name.aacute]))
    form = pikepdf.Stream(pdf, b"BT /F1 10 Tf 72 100 Td (Inside a form) Tj ET")
    form.Type, form.Subtype, form.BBox = pikepdf.Name.XObject, pikepdf.Name.Form, [0, 0, 600, 800]
    resources = pikepdf.Dictionary(Font=pikepdf.Dictionary(F1=pdf.make_indirect(font)),
                                   XObject=pikepdf.Dictionary(X1=pdf.make_indirect(form)))
    for content in (SIMPLE, b"/X1 Do", b""):
        page = pikepdf.Dictionary(Type=pikepdf.Name.Page, MediaBox=[0, 0, 600, 800], Contents=pdf.make_stream(content))
        pdf.pages.append(pikepdf.Page(pdf.make_indirect(page)))
    pdf.Root.Pages.Resources = resources
    pdf.save(folder / "simple.pdf", compress_streams=False, object_stream_mode=pikepdf.ObjectStreamMode.disable)
    pictures = pikepdf.new()
    pictures.add_blank_page()
    pictures.save(folder / "pictures.pdf")


def rewritten(folder, printed):
    with pikepdf.open(printed) as pdf:
        pdf.save(folder / "packed.pdf", object_stream_mode=pikepdf.ObjectStreamMode.generate, linearize=True)
        pdf.save(folder / "locked.pdf", encryption=pikepdf.Encryption(owner="owner", user="user"))
    data = (folder / "packed.pdf").read_bytes()
    (folder / "cut.pdf").write_bytes(data[: len(data) // 8])


simple(Path(sys.argv[1]))
if len(sys.argv) > 2:
    rewritten(Path(sys.argv[1]), sys.argv[2])
