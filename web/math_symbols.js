// What TeX's commands mean as characters, by what they are in a formula: letters, operators, large operators,
// functions, accents. Each table is written as "name character" pairs.

function pairs(text) {
  const words = text.trim().split(/\s+/);
  const table = new Map();
  for (let i = 0; i + 1 < words.length; i += 2) table.set(words[i], words[i + 1]);
  return table;
}

export const kLetters = pairs(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ varkappa ϰ
  lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ
  chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ partial ∂ nabla ∇ hbar ℏ hslash ℏ ell ℓ Re ℜ Im ℑ wp ℘ aleph ℵ beth ℶ gimel ℷ emptyset ∅ varnothing ∅
  imath ı jmath ȷ forall ∀ exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ measuredangle ∡ triangle △ Box □ square □
  blacksquare ■ Diamond ◊ lozenge ◊ clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠ sharp ♯ flat ♭ natural ♮
  degree ° checkmark ✓ complement ∁ digamma ϝ eth ð mho ℧ dag † ddag ‡ S § P ¶ pounds £ copyright © AA Å ss ß
  cdots ⋯ ldots … dots … dotsc … dotsb ⋯ dotsm ⋯ dotsi ⋯ dotso … vdots ⋮ ddots ⋱ prime ′ backprime ‵
  bigstar ★ circledR ® yen ¥ R ℝ N ℕ Z ℤ Q ℚ C ℂ reals ℝ Reals ℝ
`);
["R", "N", "Z", "Q", "C"].forEach((name) => kLetters.delete(name)); // people define these, TeX does not

export const kOperators = pairs(`
  pm ± mp ∓ times × div ÷ cdot ⋅ cdotp ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ cap ∩ cup ∪ uplus ⊎ sqcap ⊓ sqcup ⊔ vee ∨ lor ∨
  wedge ∧ land ∧ setminus ∖ smallsetminus ∖ wr ≀ diamond ⋄ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ bigcirc ◯
  dagger † ddagger ‡ amalg ⨿ ltimes ⋉ rtimes ⋊ neg ¬ lnot ¬ triangleleft ◃ triangleright ▹ dotplus ∔ boxplus ⊞
  boxtimes ⊠ boxminus ⊟ boxdot ⊡ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ equiv ≡ sim ∼ simeq ≃ approx ≈ approxeq ≊ cong ≅ propto ∝
  varpropto ∝ ll ≪ gg ≫ lll ⋘ ggg ⋙ prec ≺ succ ≻ preceq ⪯ succeq ⪰ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇
  subsetneq ⊊ supsetneq ⊋ sqsubset ⊏ sqsupset ⊐ sqsubseteq ⊑ sqsupseteq ⊒ in ∈ isin ∈ ni ∋ notin ∉ perp ⊥ mid ∣ nmid ∤
  parallel ∥ nparallel ∦ vdash ⊢ dashv ⊣ models ⊨ vDash ⊨ Vdash ⊩ asymp ≍ doteq ≐ bowtie ⋈ smile ⌣ frown ⌢ leqslant ⩽
  geqslant ⩾ lesssim ≲ gtrsim ≳ lessgtr ≶ nleq ≰ ngeq ≱ nless ≮ ngtr ≯ nsubseteq ⊈ nsupseteq ⊉ triangleq ≜ coloneqq ≔
  colon : vcentcolon : therefore ∴ because ∵ multimap ⊸ trianglelefteq ⊴ trianglerighteq ⊵ vartriangleleft ⊲ vartriangleright ⊳
  leftarrow ← gets ← rightarrow → to → uparrow ↑ downarrow ↓ leftrightarrow ↔ updownarrow ↕ Leftarrow ⇐ Rightarrow ⇒
  Uparrow ⇑ Downarrow ⇓ Leftrightarrow ⇔ Updownarrow ⇕ implies ⟹ impliedby ⟸ iff ⟺ mapsto ↦ longmapsto ⟼ hookleftarrow ↩
  hookrightarrow ↪ longleftarrow ⟵ longrightarrow ⟶ longleftrightarrow ⟷ Longleftarrow ⟸ Longrightarrow ⟹
  Longleftrightarrow ⟺ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ leftharpoonup ↼ rightharpoonup ⇀ leftharpoondown ↽
  rightharpoondown ⇁ rightleftharpoons ⇌ leadsto ⇝ rightsquigarrow ⇝ nrightarrow ↛ nleftarrow ↚ twoheadrightarrow ↠
  rightrightarrows ⇉ leftrightarrows ⇆ rightleftarrows ⇄ circlearrowright ↻ circlearrowleft ↺ surd √
  lbrace { rbrace } lbrack [ rbrack ] backslash \\ vert ∣ Vert ∥ lvert ∣ rvert ∣ lVert ∥ rVert ∥ langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉
  lfloor ⌊ rfloor ⌋ lgroup ⟮ rgroup ⟯ ulcorner ┌ urcorner ┐ llbracket ⟦ rrbracket ⟧ lt < gt > And & ldotp .
`);

// Large operators; those of the second table take their limits below and above in a display.
export const kIntegrals = pairs("int ∫ iint ∬ iiint ∭ iiiint ⨌ oint ∮ oiint ∯ oiiint ∰ smallint ∫");
export const kSums = pairs(`
  sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ biguplus ⨄ bigsqcup ⨆
`);

export const kFunctions = new Set(`arcsin arccos arctan arctg arcctg arg ch cos cosec cosh cot cotg coth csc ctg cth deg dim
  exp hom ker lb lg ln log sec sin sinh sh tan tanh tg th`.split(/\s+/));
export const kLimits = new Map([...["det", "gcd", "inf", "lim", "max", "min", "Pr", "sup", "argmax", "argmin"].map((name) => [name, name]),
  ["liminf", "lim inf"], ["limsup", "lim sup"], ["injlim", "inj lim"], ["projlim", "proj lim"], ["plim", "plim"]]);
["argmax", "argmin"].forEach((name) => kLimits.set(name, `arg ${name.slice(3)}`));

export const kAccents = pairs(`
  hat ^ check ˇ breve ˘ acute ´ grave \` tilde ~ bar ˉ vec ⃗ dot ˙ ddot ¨ dddot ⃛ mathring ˚
`);
export const kStretchyAccents = pairs(`
  widehat ^ widetilde ~ widecheck ˇ overline ‾ overrightarrow → overleftarrow ← overleftrightarrow ↔ overbrace ⏞ overbracket ⎴
  overgroup ⏠ Overrightarrow ⇒ overparen ⏜
`);
export const kUnderAccents = pairs(`
  underline ‾ underbrace ⏟ underbracket ⎵ underrightarrow → underleftarrow ← underleftrightarrow ↔ undergroup ⏡ utilde ~ underbar ‾
`);
export const kExtensible = pairs(`
  xrightarrow → xleftarrow ← xleftrightarrow ↔ xRightarrow ⇒ xLeftarrow ⇐ xLeftrightarrow ⇔ xmapsto ↦ xlongequal =
  xhookrightarrow ↪ xhookleftarrow ↩ xrightleftharpoons ⇌
`);

// Widths in em.
export const kSpaces = new Map([[",", 0.1667], ["thinspace", 0.1667], [":", 0.2222], [">", 0.2222], ["medspace", 0.2222], [";", 0.2778],
  ["thickspace", 0.2778], ["!", -0.1667], ["negthinspace", -0.1667], ["negmedspace", -0.2222], ["enspace", 0.5], ["quad", 1], ["qquad", 2]]);

// How large \big and its kin make a delimiter, in em.
export const kBigSizes = new Map(["big", "Big", "bigg", "Bigg"].flatMap((name, i) =>
  ["", "l", "r", "m"].map((side) => [name + side, [1.2, 1.8, 2.4, 3][i]])));

// ---- Fonts ----

// Where each alphabet's A, a, Α, α and 0 are among Unicode's mathematical letters; those that were there before are named.
const kAlphabets = {
  bold: { A: 0x1d400, a: 0x1d41a, greek: 0x1d6a8, 0: 0x1d7ce },
  italic: { A: 0x1d434, a: 0x1d44e, h: "ℎ", greek: 0x1d6e2 },
  "bold-italic": { A: 0x1d468, a: 0x1d482, greek: 0x1d71c, 0: 0x1d7ce },
  script: { A: 0x1d49c, a: 0x1d4b6, B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  fraktur: { A: 0x1d504, a: 0x1d51e, C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
  "double-struck": { A: 0x1d538, a: 0x1d552, C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ", 0: 0x1d7d8 },
  "sans-serif": { A: 0x1d5a0, a: 0x1d5ba, 0: 0x1d7e2 },
  monospace: { A: 0x1d670, a: 0x1d68a, 0: 0x1d7f6 },
};

export const kFonts = pairs(`
  mathbf bold bold bold boldsymbol bold-italic bm bold-italic mathbb double-struck Bbb double-struck mathcal script mathscr script
  mathfrak fraktur frak fraktur mathsf sans-serif mathtt monospace mathit italic mathrm normal rm normal bf bold it italic
  mathnormal default
`);
export const kTextFonts = new Map([["text", ""], ["textrm", ""], ["textnormal", ""], ["mbox", ""], ["hbox", ""], ["textup", ""],
  ["textmd", ""], ["textbf", "bold"], ["textit", "italic"], ["emph", "italic"], ["textsf", "sans-serif"], ["texttt", "monospace"]]);

// "x" as the alphabet writes it; characters that it does not have stay.
export function inAlphabet(text, name) {
  const alphabet = kAlphabets[name];
  if (!alphabet) return text;
  return [...text].map((c) => {
    if (c.length === 1 && typeof alphabet[c] === "string") return alphabet[c];
    const code = c.codePointAt(0);
    const from = (first, base) => String.fromCodePoint(base + code - first);
    if (/[A-Z]/.test(c)) return from(0x41, alphabet.A);
    if (/[a-z]/.test(c)) return from(0x61, alphabet.a);
    if (/[0-9]/.test(c) && alphabet[0]) return from(0x30, alphabet[0]);
    if (/[Α-Ω]/.test(c) && alphabet.greek) return from(0x391, alphabet.greek);
    if (/[α-ω]/.test(c) && alphabet.greek) return from(0x3b1, alphabet.greek + 26);
    return c;
  }).join("");
}
