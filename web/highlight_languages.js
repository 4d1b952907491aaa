// What the languages look like to highlight.js: rules are [kind, pattern] in the order in which they are tried; a
// `word` becomes a keyword, constant or type by the sets beside it. A string or comment that is not closed goes on to
// the end of its line or of the text.

const words = (text) => new Set(text.trim().split(/\s+/));
const kWord = ["word", /[A-Za-z_$\u00a1-\uffff][\w$\u00a1-\uffff]*/];
const kCall = ["function", /[A-Za-z_$\u00a1-\uffff][\w$\u00a1-\uffff]*(?=\()/];
const kNumber = ["number", /\b0[xX][\da-fA-F_']+\w*|\b0[bB][01_']+\w*|\b\d[\d_']*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?\w*|\.\d+(?:[eE][+-]?\d+)?\w*/];
const kDouble = ["string", /"(?:[^"\\\n]|\\[^])*"?/];
const kSingle = ["string", /'(?:[^'\\\n]|\\[^])*'?/];
const kBlock = ["comment", /\/\*[^]*?(?:\*\/|$(?![^]))/];
const kLine = ["comment", /\/\/.*/];
const kHash = ["comment", /#.*/];

// A name that is called is a function unless it is a keyword: words that open a statement come first.
const called = (keywords) => ["keyword", new RegExp(`\\b(?:${[...keywords].join("|")})\\b(?![\\w$])`)];

const kC = words(`alignas alignof asm auto break case catch class concept const consteval constexpr constinit const_cast continue
  co_await co_return co_yield decltype default delete do dynamic_cast else enum explicit export extern final for friend goto if import
  inline module mutable namespace new noexcept operator override private protected public register reinterpret_cast requires return
  sizeof static static_assert static_cast struct switch template this thread_local throw try typedef typeid typename union using
  virtual volatile while restrict __global__ __device__ __host__ __shared__ __restrict__ __constant__`);
const kJava = words(`abstract as assert async await base break case catch class const continue data default defer delegate do dynamic
  else enum event explicit export extends extension extern final finally fixed fn for foreach fun func get global goto guard if implements
  implicit import in init inline inner instanceof interface internal is let lateinit lock match module mut mutating namespace native new
  object open operator out override package params partial private protected protocol public readonly record ref required return sealed
  set static strictfp struct super suspend switch synchronized this throw throws trait transient try type typealias typeof unchecked
  unsafe use using val var virtual void volatile when where while with yield`);
const kJs = words(`abstract as async await break case catch class const continue debugger declare default delete do else enum export
  extends finally for from function get if implements import in infer instanceof interface is keyof let namespace new of package private
  protected public readonly return satisfies set static super switch this throw try type typeof var void while with yield`);
const kPython = words(`and as assert async await break case class continue def del elif else except finally for from global if import in is
  lambda match nonlocal not or pass raise return try while with yield`);
const kRust = words(`as async await box break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub
  ref return static struct super trait type union unsafe use where while yield macro_rules`);
const kGo = words(`break case chan const continue default defer else fallthrough for func go goto if import interface map package range
  return select struct switch type var`);
const kRuby = words(`alias and begin break case class def defined do else elsif end ensure for if in module next not or redo rescue retry
  return self super then undef unless until when while yield require attr_accessor attr_reader private protected public`);
const kShell = words(`if then else elif fi case esac for while until do done in function select time return exit break continue local
  export readonly declare unset shift source alias set trap eval exec`);
const kSql = words(`select from where and or not in is null as on join left right inner outer full cross using group by having order asc desc
  limit offset union all distinct insert into values update set delete create table view index drop alter add column primary key foreign
  references constraint unique default check case when then else end exists between like ilike with recursive returning over partition
  window begin commit rollback transaction if replace temporary trigger function procedure grant revoke to cascade explain analyze
  lateral fetch first next rows only interval cast`);
const kLua = words("and break do else elseif end for function goto if in local not or repeat return then until while");
const kHaskell = words(`case class data default deriving do else family forall foreign if import in infix infixl infixr instance let module
  newtype of then type where qualified`);

const kCTypes = words(`bool char char8_t char16_t char32_t double float int long short signed unsigned void wchar_t size_t ptrdiff_t int8_t
  int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t string vector map set optional unique_ptr shared_ptr string_view span half`);
const kBasicTypes = words(`bool boolean byte char decimal double float int long short string uint ulong sbyte Int Int32 Int64 Long Double Float
  Bool Boolean String Char Byte Any Unit Void List Map Set Array Object Integer Optional`);
const kTruths = words("true false null nullptr NULL nil none None True False undefined NaN Infinity self Self it");

const clike = (keywords, more = {}) => ({
  rules: [kLine, kBlock, kDouble, ["string", /'(?:[^'\\\n]|\\.[^'\n]*)'/], ...(more.first ?? []), called(keywords), kNumber, kCall, kWord],
  keywords,
  constants: kTruths,
  types: kBasicTypes,
  ...more,
});

export const kLanguages = {
  cpp: clike(kC, { aliases: ["c", "c++", "cc", "cxx", "h", "hpp", "cuda", "cu", "objc", "objective-c", "arduino", "glsl", "hlsl", "wgsl", "metal"],
    first: [["meta", /^[ \t]*#[ \t]*\w+.*/], ["string", /R"\([^]*?\)"/]], types: kCTypes }),
  java: clike(kJava, { aliases: ["kotlin", "kt", "csharp", "cs", "c#", "swift", "scala", "dart", "groovy", "zig", "solidity", "proto", "protobuf"],
    first: [["string", /"""[^]*?(?:"""|$(?![^]))/], ["meta", /@\w+/]] }),
  php: clike(new Set([...kJava, ...words("echo function elseif endif endforeach require include use array isset unset")]), {
    first: [["meta", /<\?(?:php|=)?|\?>/], ["variable", /\$\w+/], kHash] }),
  javascript: clike(kJs, { aliases: ["js", "jsx", "ts", "tsx", "typescript", "mjs", "cjs", "node"],
    first: [["string", /`(?:[^`\\]|\\[^])*`?/], ["meta", /@\w+/]],
    types: words("any bigint boolean never number object string symbol unknown void Array Promise Record Map Set Date Error RegExp") }),
  rust: { aliases: ["rs"], keywords: kRust, constants: kTruths,
    types: words(`bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize String Vec Option Result Box Rc Arc HashMap HashSet
      Some Ok Err`),
    rules: [kLine, kBlock, ["meta", /#!?\[[^\]\n]*\]?/], ["string", /b?r#*"[^]*?"#*|b?"(?:[^"\\]|\\[^])*"?/], ["string", /b?'(?:[^'\\\n]|\\[^'\n]+)'/],
      ["variable", /'[a-z_]\w*/], called(kRust), kNumber, ["function", /\b[A-Za-z_]\w*!(?=[[({])/], kCall, kWord] },
  go: clike(kGo, { aliases: ["golang"], first: [["string", /`[^`]*`?/]],
    types: words(`any bool byte comparable complex64 complex128 error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint16
      uint32 uint64 uintptr`) }),
  python: { aliases: ["py", "python3", "pycon", "ipython", "gdscript", "starlark", "bazel"], keywords: kPython, constants: kTruths,
    types: words("bool bytes dict float frozenset int list object set str tuple type Any Callable Iterable Iterator Optional Union"),
    rules: [kHash, ["string", /[rRbBfFuU]{0,2}(?:"""[^]*?(?:"""|$(?![^]))|'''[^]*?(?:'''|$(?![^]))|"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?)/],
      ["meta", /@[\w.]+/], called(kPython), kNumber, kCall, kWord] },
  ruby: { aliases: ["rb", "elixir", "ex", "exs", "crystal"], keywords: kRuby, constants: kTruths,
    rules: [kHash, kDouble, kSingle, ["constant", /:[A-Za-z_]\w*[?!]?/], ["variable", /@{1,2}\w+|\$\w+/], called(kRuby), kNumber,
      ["function", /\b[a-z_]\w*[?!]?(?=\()/], kWord] },
  shell: { aliases: ["bash", "sh", "zsh", "fish", "console", "shell-session", "powershell", "ps1", "dockerfile", "docker", "makefile", "make",
    "cmake", "batch", "nix"], keywords: kShell,
    rules: [["comment", /(?<![\w$\\{])#.*/], ["string", /"(?:[^"\\]|\\[^])*"?|'[^']*'?/], ["variable", /\$\{[^}\n]*\}?|\$[A-Za-z_]\w*|\$[\d@*#?!$-]/],
      ["function", /(?=[\w.\/])(?<=^[ \t]*(?:[$>] )?)(?:sudo |RUN |FROM |COPY |CMD |ENTRYPOINT |WORKDIR |ENV )?[\w./-]+(?=\s|$)(?!\s*=)/],
      ["meta", /(?<=\s)--?[A-Za-z][\w-]*/], ["number", /\b\d+(?:\.\d+)?\b/], ["word", /[A-Za-z_][\w-]*/]] },
  json: { aliases: ["json5", "jsonc", "jsonl", "arguments", "result"], constants: words("true false null"),
    rules: [kLine, kBlock, ["property", /"(?:[^"\\\n]|\\[^])*"(?=\s*:)/], kDouble, ["number", /-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/], kWord] },
  html: { aliases: ["xml", "svg", "xhtml", "vue", "svelte", "rss", "plist", "mathml", "handlebars", "jinja"],
    rules: [["comment", /<!--[^]*?(?:-->|$(?![^]))/], ["meta", /<[!?][^>]*>?/], ["keyword", /<\/?[A-Za-z][\w:.-]*|\/?>/], ["meta", /&#?\w+;/],
      ["property", /[A-Za-z_:@][\w:.-]*(?=\s*=\s*["'{])/], ["string", /(?=["'])(?<==\s*)(?:"[^"]*"?|'[^']*'?)/], ["word", /[A-Za-z_:@][\w:.-]*/]] },
  css: { aliases: ["scss", "sass", "less"],
    rules: [kBlock, ["comment", /\/\/.*/], kDouble, kSingle, ["keyword", /@[\w-]+|!important\b/], ["variable", /(?:--|\$)[\w-]+/],
      ["number", /#[\da-fA-F]{3,8}\b|-?\b\d*\.?\d+(?:%|[a-z]+\b)?/], ["property", /[\w-]+(?=\s*:[^:])/], ["function", /[\w-]+(?=\()/],
      ["type", /[.#&][A-Za-z_-][\w-]*|::?[a-z-]+/], ["word", /[\w-]+/]] },
  sql: { aliases: ["postgres", "postgresql", "mysql", "sqlite", "plsql", "tsql"], ignoreCase: true, keywords: kSql,
    constants: words("true false null"), types: words(`int integer bigint smallint serial text varchar char boolean bool date time timestamp
      timestamptz numeric decimal real float double json jsonb uuid blob bytea`),
    rules: [["comment", /--.*/], kBlock, ["string", /'(?:[^']|'')*'?/], ["property", /"[^"\n]*"|`[^`\n]*`/], called(kSql), kNumber, kCall, kWord] },
  yaml: { aliases: ["yml"], constants: words("true false null yes no on off"),
    rules: [["comment", /(?<!\S)#.*/], ["property", /[\w./-]+(?=\s*:(?:\s|$))/], kDouble, kSingle, ["meta", /^---|[&*]\w+|!\w+/],
      ["number", /(?<![\w.-])-?\d+(?:\.\d+)?(?![\w.-])/], ["word", /[\w./-]+/]] },
  toml: { aliases: ["ini", "conf", "cfg", "properties", "env", "dotenv", "editorconfig"], constants: words("true false"),
    rules: [["comment", /(?<!\S)[#;].*/], ["keyword", /^[ \t]*\[\[?[^\]\n]*\]?\]?/], ["property", /[\w.-]+(?=\s*=)|"[^"\n]*"(?=\s*=)/],
      ["string", /"""[^]*?(?:"""|$(?![^]))|'''[^]*?(?:'''|$(?![^]))/], kDouble, kSingle, ["number", /(?<![\w-])[+-]?\d[\d_.:TZ+-]*(?!\w)/], ["word", /[\w.-]+/]] },
  diff: { aliases: ["patch", "udiff"],
    rules: [["meta", /^(?:diff|index|@@|---|\+\+\+).*/], ["added", /^\+.*/], ["removed", /^-.*/], ["", /.+/]].filter(([kind]) => kind) },
  lua: { keywords: kLua, constants: kTruths,
    rules: [["comment", /--\[\[[^]*?(?:\]\]|$(?![^]))|--.*/], kDouble, kSingle, ["string", /\[\[[^]*?(?:\]\]|$(?![^]))/], called(kLua), kNumber, kCall, kWord] },
  haskell: { aliases: ["hs", "elm", "purescript", "ocaml", "ml", "fsharp", "f#"], keywords: new Set([...kHaskell, "match", "with", "fun", "rec"]),
    rules: [["comment", /--.*|\{-[^]*?(?:-\}|$(?![^]))/], kDouble, ["string", /'(?:[^'\\\n]|\\.)'/], kNumber, ["type", /\b[A-Z][\w']*/], ["word", /[a-z_][\w']*/]] },
  lisp: { aliases: ["clojure", "clj", "scheme", "racket", "elisp", "emacs-lisp", "common-lisp"],
    rules: [["comment", /;.*/], kDouble, ["constant", /[:'#][\w+*/<>=!?-]+/], ["keyword", /(?<=\()(?:def\w*|let\*?|lambda|fn|if|cond|when|unless|loop|do|ns|quote)(?=[\s()])/],
      ["function", /(?<=\()[^\s()"';]+/], ["number", /(?<![\w-])-?\d+(?:\.\d+)?(?![\w-])/], ["word", /[^\s()"';]+/]] },
  r: { aliases: ["julia", "jl", "matlab", "octave", "perl", "pl"], constants: words("TRUE FALSE NULL NA Inf true false nothing"),
    keywords: words(`if else for while function end return in break next repeat begin struct mutable using import export module let const
      do my our local sub use foreach elsif unless elseif switch case otherwise`),
    rules: [["comment", /[#%].*/], kDouble, kSingle, ["variable", /[$@]\w+/], kNumber, kCall, ["word", /[A-Za-z_.$\u00a1-\uffff][\w.$\u00a1-\uffff]*/]] },
  tex: { aliases: ["latex", "bibtex"],
    rules: [["comment", /(?<!\\)%.*/], ["keyword", /\\(?:begin|end|documentclass|usepackage|newcommand|section|subsection)\b/],
      ["function", /\\[A-Za-z@]+|\\[^]/], ["string", /\$[^$\n]*\$?/], ["number", /\b\d+(?:\.\d+)?/]] },
  markdown: { aliases: ["md", "mdx"],
    rules: [["keyword", /^#{1,6} .*/], ["string", /`[^`\n]*`?/], ["type", /\*\*[^*\n]+\*\*|__[^_\n]+__/], ["meta", /^[ \t]*(?:[-*+>]|\d+\.)(?= )/],
      ["function", /!?\[[^[\]\n]*\](?=\()/], ["comment", /<!--[^]*?(?:-->|$(?![^]))/]] },
};
