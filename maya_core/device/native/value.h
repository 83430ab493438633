// What the bytes of a storage are: data of the host, one value everywhere, a sample that stands for data that nobody
// knows, or a recipe (an op and its operands), which the host computes when something reads the value.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <stdexcept>
#include <variant>

namespace maya {

// Larger data are not computed on the host, and not sampled.
constexpr int64_t kMostElements = int64_t(1) << 31, kMostSampled = int64_t(1) << 30;
constexpr double kMostCost = double(int64_t(1) << 33);  // of one reading, in elements
constexpr int64_t kDeepest = 256;                       // recipes that rest on one another

struct Layout {  // how a tensor lies in its storage
  at::DimVector sizes, strides;
  int64_t offset = 0, bytes = 0;  // `bytes` are those of the storage
  at::ScalarType dtype = at::kByte;
  bool conj = false, neg = false;

  Layout() = default;
  explicit Layout(const at::Tensor& tensor);
};

// What a sample that stands for unknown data looks like: numbers around 0, above 0, between 0 and 1; above 0 if those
// of the op's inputs are; below 0.
enum class Sample : uint8_t { Any, Positive, Unit, AsInputs, Negative };

struct Recipe;

struct Uniform {  // one value everywhere
  at::ScalarType dtype;
  std::array<char, 16> element;
};
struct HeldMemory;
struct Data {  // bytes on the host
  c10::Storage memory;
  char* start;
  int64_t bytes;
  // Of the program's own memory, which the program may change or want to free: what it was when it was copied.
  struct Program {
    HeldMemory* budget;
    at::ScalarType dtype;
    std::optional<std::pair<c10::VariableVersion, uint32_t>> version;
    uint64_t digest;
  };
  std::optional<Program> program = {};
};
struct Sampled {  // stands for data that nobody knows
  at::ScalarType dtype;
  Sample sample;
  uint64_t seed;
  // Indices: numbers below `choices`, different ones within each of the rows; 0: no indices.
  int64_t choices = 0, per_row = 1, stride = 1;
};
struct Computed {
  c10::intrusive_ptr<Recipe> recipe;
  int slot;  // which of its results; ~slot: the operand that it writes
};

struct Value final : c10::intrusive_ptr_target {
  std::variant<Uniform, Data, Sampled, Computed> is;
  bool made_up = false;     // rests on a sample
  bool routed = false;      // of samples, rests only on the choices of topk, which are assumed to be spread evenly
  bool of_weights = false;  // rests on weights: computed from their first values, but nobody knows the later ones
  int depth = 0;            // of recipes that are not computed yet
  double cost = 0;          // of computing them, in elements

  explicit Value(std::variant<Uniform, Data, Sampled, Computed> what) : is(std::move(what)) {}
  ~Value() override;
  void release_resources() override;

  const Uniform* uniform() const { return std::get_if<Uniform>(&is); }
  const Sampled* sampled() const { return std::get_if<Sampled>(&is); }
  bool ready() const { return !std::holds_alternative<Computed>(is); }
};
using ValueRef = c10::intrusive_ptr<Value>;

struct Operand {
  ValueRef value;
  Layout layout;
  bool written;
};

struct Recipe final : c10::intrusive_ptr_target {
  c10::OperatorHandle op;
  std::optional<uint64_t> seed;        // of an op that draws random numbers
  std::vector<c10::IValue> arguments;  // `operand_place()` stands for each operand
  std::vector<Operand> operands;
  std::vector<std::pair<int, Layout>> results;  // new tensors, by slot
  bool heavy = false, done = false, made_up = false, of_numbers = false, of_weights = false;
  bool routes = false;  // its second result are choices: topk
  double cost = 0;
  std::vector<std::pair<int, Data>> made;

  explicit Recipe(c10::OperatorHandle handle) : op(std::move(handle)) {}
  void release_resources() override {
    arguments.clear();
    operands.clear();
    made.clear();
  }
};

void note_origin(Recipe& recipe, const Value& operand);  // the recipe rests on what its operand rests on

// Hides host arithmetic from autograd, autocast and any mode that the program has switched on.
struct OnHost {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher})};
};

ValueRef uniform_value(at::ScalarType dtype, const at::Scalar& value);
ValueRef as_weights(const ValueRef& value);  // the same, as the first value of weights
ValueRef sampled_value(at::ScalarType dtype, Sample sample);
ValueRef sampled_indices(int64_t choices, int64_t per_row, int64_t stride, bool routed);
// The bytes of a dense host tensor, in its own layout. Larger data are kept by reference, not copied.
ValueRef host_data(const at::Tensor& dense, bool made_up);
// A host tensor with the value. It may share memory with the value and must not be written. If the value cannot be
// computed, it is a sample from then on.
at::Tensor read_value(const ValueRef& value, const Layout& layout);
at::Tensor operand_place();
std::vector<at::Tensor> flat(const torch::jit::Stack& results);  // all returned tensors, those in lists too
double cost_of_product(double operands_and_result);              // from the product of their numbers of elements
// Runs a recipe at once; false if the host has no kernel for such a call.
bool compute(Recipe& recipe);
ValueRef result_of(const c10::intrusive_ptr<Recipe>& recipe, int slot);
void forget_samples();  // a new emulation starts with the same ones
// All samples of truth values are false, or true, and all indices choose the last ones, or the first. For bounds of
// sizes.
void set_extreme(std::optional<bool> everything);
std::optional<bool> extreme();

}  // namespace maya
