// The tree a chat template is parsed into. One struct for expressions and one for statements: which fields a
// kind uses is said beside it. Depths are bounded by the parser, so visiting and destroying a tree may
// recurse.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jinja/value.h"

namespace millrace::jinja {

enum class ExprKind : uint8_t {
  kConstant,      // constant
  kName,          // name
  kNamespaceRef,  // name, attribute: only as the target of set
  kList,          // args
  kTuple,         // args
  kDict,          // args: key, value, key, value, ...
  kAttribute,     // args[0].attribute
  kItem,          // args[0][args[1]]
  kSlice,         // args[0..2]: start, stop, step; null where absent
  kCall,          // args[0](args[1..], keyword, star, star_star)
  kFilter,        // args[0] | name(args[1..], ...); args[0] is null in a filter block
  kTest,          // args[0] is name(args[1..], ...)
  kUnary,         // op: '-', '+', '!' (not)
  kBinary,        // op: + - * / F (//) % P (**)
  kAnd,           // args
  kOr,            // args
  kCompare,       // args[0] ops[0] args[1] ops[1] args[2] ...
  kConcat,        // args
  kCondition,     // args[0] if args[1] else args[2], which may be null
};

// Whether what is printed at a place is escaped, by the autoescape statements around it: jinja2 decides when
// it compiles, but for a condition that is no constant.
enum class Escaping : uint8_t { kNever, kAlways, kAsNow };

enum class CompareOp : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Expr {
  ExprKind kind;
  char op = 0;
  int line = 0;
  uint32_t depth = 1;
  std::string name, attribute;
  Value constant;
  std::vector<ExprPtr> args;
  std::vector<CompareOp> ops;
  std::vector<std::pair<std::string, ExprPtr>> keyword;
  ExprPtr star, star_star;
  Escaping escaping = Escaping::kNever;  // kConcat
  Native native = nullptr;  // filters and tests; null where this interpreter has none of that name
};

enum class StmtKind : uint8_t {
  kText,        // text
  kOutput,      // values
  kIf,          // branches
  kFor,         // target, value (what is iterated), test, body, otherwise, recursive
  kSet,         // target, value
  kSetBlock,    // target, value (a filter chain on null, or null), body
  kMacro,       // text (name), signature, body
  kCall,        // value (the call), signature, body
  kFilter,      // value (a filter chain on null), body
  kWith,        // targets and values in pairs, body
  kBreak,       //
  kContinue,    //
  kGeneration,  // body
  kAutoescape,  // value (the condition), body
};

struct Stmt;
using Body = std::vector<std::unique_ptr<Stmt>>;

struct Branch {
  ExprPtr test;  // null: else
  Body body;
};

struct Signature {
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;  // of the last parameters
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;
};

struct Stmt {
  StmtKind kind;
  int line = 0;
  std::string text;
  ExprPtr target, value, test;
  std::vector<ExprPtr> targets, values;
  std::vector<Branch> branches;
  Body body, otherwise;
  Signature signature;
  bool recursive = false;
  Escaping escaping = Escaping::kNever;  // kOutput, kFor, kSetBlock, kFilter
};

}  // namespace millrace::jinja
