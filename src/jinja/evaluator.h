// Runs a parsed template: one pass over the tree, writing to a string. Depth, steps and bytes are bounded.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/ast.h"
#include "jinja/render_state.h"

namespace millrace::jinja {

class Evaluator {
 public:
  explicit Evaluator(RenderState& state) : state_(state), scope_(std::make_shared<Scope>(nullptr)) {}
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  // `name` must outlive the evaluator.
  void set_variable(std::string_view name, Value value) { scope_->set(name, std::move(value)); }
  std::string run(const Body& body);
  int line() const { return line_; }
  // Does `item` pass the test of the for statement?
  bool passes(const LoopObject& loop, const Value& item);

 private:
  // Nested evaluations, macro calls included: about 1 KiB of stack each, a few with sanitizers.
  static constexpr int kMaxDepth = 1000;
  enum class Flow : uint8_t { kNormal, kBreak, kContinue };

  // statements (evaluator.cpp)
  Flow execute(const Body& body);
  Flow execute(const Stmt& stmt);
  Flow execute_if(const Stmt& stmt);
  Flow execute_for(const Stmt& stmt);
  Flow execute_with(const Stmt& stmt);
  Flow execute_captured(const Stmt& stmt);
  Flow execute_autoescape(const Stmt& stmt);
  bool escapes(Escaping escaping) const {
    return escaping == Escaping::kAlways || (escaping == Escaping::kAsNow && state_.autoescape);
  }
  void run_loop(const Stmt& stmt, std::shared_ptr<Scope> outer, const Value& iterable, int64_t depth0);
  void define_macro(const Stmt& stmt);
  void execute_call(const Stmt& stmt);
  void assign(const Expr& target, Value value);
  void assign_tuple(const Expr& target, const Value& value);
  void write(std::string_view text);

  // expressions (evaluator_expr.cpp)
  Value evaluate(const Expr& expr);
  Value evaluate_node(const Expr& expr);
  Value evaluate_name(const Expr& expr);
  Value evaluate_dict(const Expr& expr);
  Value evaluate_item(const Expr& expr);
  Value evaluate_compare(const Expr& expr);
  Value evaluate_concat(const Expr& expr);
  Value evaluate_call(const Expr& expr);
  Value evaluate_filter(const Expr& expr, const Value* block_text = nullptr);
  Value evaluate_test(const Expr& expr);
  std::vector<Value> evaluate_all(const std::vector<ExprPtr>& exprs, size_t from = 0);
  Arguments evaluate_arguments(const Expr& call);
  Value call(const Value& callee, Arguments arguments);
  Value call_macro(const MacroObject& macro, Arguments arguments);
  void bind_macro(const Stmt& definition, Arguments& arguments);
  void bind_specials(const Stmt& definition, Arguments& arguments);

  struct Depth {
    explicit Depth(Evaluator& evaluator_in);
    ~Depth() { --evaluator.depth_; }
    Evaluator& evaluator;
  };
  // A new scope inside `parent` until the end of the block.
  struct Inner {
    Inner(Evaluator& evaluator_in, std::shared_ptr<Scope> parent)
        : evaluator(evaluator_in),
          saved(std::exchange(evaluator_in.scope_, std::make_shared<Scope>(std::move(parent)))) {}
    ~Inner() { evaluator.scope_ = std::move(saved); }
    Evaluator& evaluator;
    std::shared_ptr<Scope> saved;
  };
  // Output goes to `text` until the end of the block.
  struct Capture {
    explicit Capture(Evaluator& evaluator_in)
        : evaluator(evaluator_in), saved(std::exchange(evaluator_in.out_, &text)) {}
    ~Capture() { evaluator.out_ = saved; }
    Evaluator& evaluator;
    std::string text;
    std::string* saved;
  };

  RenderState& state_;
  std::shared_ptr<Scope> scope_;
  std::vector<std::shared_ptr<Scope>> macro_scopes_;
  std::string* out_ = nullptr;
  int depth_ = 0, line_ = 0;
};

}  // namespace millrace::jinja
