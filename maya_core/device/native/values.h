// The values of device tensors. What came from the host is known at any size, and so is what is computed from it: an op
// leaves a recipe, which the host computes when something reads the value. Data that nobody knows are read as a sample:
// the same one at every reading, and for everything that is computed from it.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <unordered_map>

#include "device.h"

namespace maya {

constexpr int64_t kExchangedIntegers = 1 << 20, kExchangedFloats = 1 << 12;  // ranks exchange no more than this
constexpr int64_t kExchangedObjects = 1 << 30;                               // bytes of pickled objects

struct Reading {
  at::Tensor value;  // on the host; must not be written
  bool made_up;      // rests on a sample
  bool routed;       // of samples, rests only on choices that are assumed to be spread evenly
  bool unknown;      // rests on a sample or on weights: nobody knows what it is in a training
};
bool is_known(const at::Tensor& tensor);
// The value if it is known, or what stands for it. None if the tensor is too large to compute or sample.
std::optional<Reading> read(const at::Tensor& tensor);
std::optional<at::Tensor> host_value(const at::Tensor& tensor);  // the true value, if it is known
// The device tensor now holds these values.
void remember(const at::Tensor& tensor, const at::Tensor& host, bool made_up = false);
// Parts of one storage that together make up all of it.
void remember_parts(const std::vector<at::Tensor>& parts, const std::vector<at::Tensor>& hosts, bool made_up);
void carry_objects(bool carry);  // whether byte tensors of this thread hold pickled objects
int64_t exchange_limit(at::ScalarType dtype);
void remember_uniform(const at::Tensor& tensor, const at::Scalar& value);
void forget(const at::Tensor& tensor, Sample sample = Sample::Any);
void mark_fresh(const at::Tensor& tensor);  // nothing has written to it yet
// Weights change in training, so nothing that is computed from them is known. Of a few small ones, the first values are
// computed with.
void mark_weights(const at::Tensor& tensor);
void mark_written(const at::Tensor& tensor);                    // unknown, if it was fresh
void copy_value(const at::Tensor& to, const at::Tensor& from);  // either may be on the host, and both have one shape
void read_to_host(const at::Tensor& host, const at::Tensor& device);
Shadow resized(Shadow shadow, int64_t had, int64_t bytes);
// Host memory that holds samples, or was never filled because nobody reads it.
bool is_made_up(const c10::Storage& host);
void mark_made_up(const c10::Storage& host);
// Called when the program reads a value that nobody knows: how it reads it, the device tensor and the sample. It may
// return another value, which the tensor has from then on.
using OnUnknown = std::function<std::optional<at::Scalar>(const char* how, const at::Tensor&, const at::Tensor&)>;
void set_on_unknown(OnUnknown callback);
bool has_equal_value(const at::Tensor& one, const at::Tensor& other);  // unknown numbers are assumed to be equal
at::Scalar read_item(const at::Tensor& tensor);

// What is assumed about an op's result when its inputs are unknown.
enum class Assume : uint8_t { Nothing, AllFinite, True, False, RandomIndices, SameIsEqual, CompareInfinity };

// What Python declares about an op (maya_core/ops/registry.py), by its full name; set at install.
struct OpValues {
  Assume assume = Assume::Nothing;
  Sample sample = Sample::Any;
  bool only_writes = false, keeps_uniform = false, heavy = false, mixes_devices = false;
};
void set_op_values(std::unordered_map<std::string, OpValues> table);
OpValues op_values(const std::string& name, const std::string& overload = "");

struct ValueTraits {  // constant for an op: from its schema, its tags and OpValues
  Assume assume = Assume::Nothing;
  Sample sample = Sample::Any;
  bool computable = true;  // can be computed on the host at all
  bool pointwise = false;  // one uniform input gives one uniform output
  bool keeps_uniform = false;
  enum Second : uint8_t { Other, Number, Factor, Exponent, Least } second = Other;  // what the second argument is
  bool heavy = false;                                                               // a matrix product or the like
  bool random = false;
  bool routes = false;        // chooses the best: a router
  bool lists = false;         // works on lists of tensors, of which none influences another
  int dim_argument = -1;      // which argument is `dim`, if any
  std::vector<bool> written;  // per argument: changed by the op
  std::vector<bool> only_written;
};
ValueTraits value_traits(const c10::OperatorHandle& op);

// What will be known about the results of an op, found out before the op changes anything.
struct Foreseen {
  enum Kind : uint8_t { Unknown, Everywhere, ByRecipe };
  Kind kind = Unknown;
  std::vector<at::Tensor> elements = {};  // Everywhere: one element of each result
  c10::intrusive_ptr<Recipe> recipe = {};
  bool at_once = false;  // small, and everything it rests on is there
};
struct NewTensors {
  int64_t elements = 0;
  bool integral = false;  // one of them holds integers or booleans
  bool truth = false;     // one of them holds booleans
};
// Whether the results of such a call may be followed if an input is unknown. It depends on dtypes and sizes only.
bool may_follow_unknown(const ValueTraits& traits, const std::vector<c10::TensorImpl*>& inputs, NewTensors made);
bool any_unknown(const std::vector<c10::TensorImpl*>& inputs);
Foreseen foresee(const c10::OperatorHandle& op, const ValueTraits& traits, at::ArrayRef<c10::IValue> arguments,
                 NewTensors new_tensors);
using Made = std::vector<std::pair<int, at::Tensor>>;  // new tensors, by their place among all returned tensors
// After the op: its results have the foreseen values. False if the host has no kernel for such a call.
bool remember_foreseen(Foreseen& foreseen, const ValueTraits& traits, at::ArrayRef<c10::IValue> arguments,
                       const Made& made);
// Before an op of which nothing is foreseen: what stands for its results.
Sample outcome_sample(const ValueTraits& traits, at::ArrayRef<c10::IValue> arguments);
// After it: forgets what it changed, and assumes what the traits say.
void assume_outcome(const ValueTraits& traits, at::ArrayRef<c10::IValue> arguments, at::ArrayRef<c10::IValue> returns,
                    Sample sample, const Made& made);

// For an op that a rule runs: its outputs have the values that the op has on the host.
void follow(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments, const std::vector<at::Tensor>& outputs);

}  // namespace maya
