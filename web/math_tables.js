// TeX's delimiters and the environments that are tables.

// What may follow \left, \right, \middle, \big.
export const kDelimiters = new Map([
  ["\\{", "{"], ["\\}", "}"], ["\\lbrace", "{"], ["\\rbrace", "}"], ["\\|", "∥"], ["|", "∣"], ["\\vert", "∣"], ["\\Vert", "∥"],
  ["\\lvert", "∣"], ["\\rvert", "∣"], ["\\lVert", "∥"], ["\\rVert", "∥"], ["\\langle", "⟨"], ["\\rangle", "⟩"], ["<", "⟨"], [">", "⟩"],
  ["\\lceil", "⌈"], ["\\rceil", "⌉"], ["\\lfloor", "⌊"], ["\\rfloor", "⌋"], ["\\lbrack", "["], ["\\rbrack", "]"], ["\\lgroup", "⟮"],
  ["\\rgroup", "⟯"], ["\\uparrow", "↑"], ["\\downarrow", "↓"], ["\\updownarrow", "↕"], ["\\Uparrow", "⇑"], ["\\Downarrow", "⇓"],
  ["\\Updownarrow", "⇕"], ["\\backslash", "\\"], ["\\llbracket", "⟦"], ["\\rrbracket", "⟧"], ["\\lt", "⟨"], ["\\gt", "⟩"], [".", ""],
]);

// columns: how cells are aligned ("given": the environment says it); repeats: the pattern goes on over all columns;
// display: formulas inside are as large as the one around; skips: an argument that changes nothing here.
const kind = (fences, columns, more = {}) => ({ fences, columns, class: "matrix", display: false, ...more });
const aligned = { class: "aligned", display: true, repeats: true };
const gathered = { class: "gathered", display: true };

export const kEnvironments = new Map([
  ["matrix", kind("", "")],
  ["smallmatrix", kind("", "", { class: "small" })],
  ["pmatrix", kind("()", "")],
  ["bmatrix", kind("[]", "")],
  ["Bmatrix", kind("{}", "")],
  ["vmatrix", kind("∣∣", "")],
  ["Vmatrix", kind("∥∥", "")],
  ["array", kind("", "given")],
  ["darray", kind("", "given", { display: true })],
  ["subarray", kind("", "given", { class: "stacked" })],
  ["cases", kind("{", "ll", { class: "cases" })],
  ["dcases", kind("{", "ll", { class: "cases", display: true })],
  ["rcases", kind(["", "}"], "ll", { class: "cases" })],
  ["aligned", kind("", "rl", aligned)],
  ["align", kind("", "rl", aligned)],
  ["alignat", kind("", "rl", { ...aligned, skips: true })],
  ["alignedat", kind("", "rl", { ...aligned, skips: true })],
  ["eqnarray", kind("", "rcl", aligned)],
  ["split", kind("", "rl", aligned)],
  ["flalign", kind("", "rl", aligned)],
  ["gathered", kind("", "", gathered)],
  ["gather", kind("", "", gathered)],
  ["multline", kind("", "", gathered)],
  ["equation", kind("", "", gathered)],
  ["displaymath", kind("", "", gathered)],
]);
