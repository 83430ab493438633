// Value shadows: what the host knows about data on the device. Data from the host and small results computed from it
// are known exactly; a tensor filled with one value is known at any size.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <unordered_map>

#include "device.h"

namespace maya {

// Larger tensors are not remembered: programs branch on small ones or on integers.
constexpr int64_t kKnownIntegers = 1 << 20, kKnownFloats = 1 << 16;
constexpr int64_t kKnownObjects = 1 << 30;     // bytes of pickled objects that ranks exchange
constexpr int64_t kExchangedFloats = 1 << 12;  // ranks exchange no more than this

bool is_known(const at::Tensor& tensor);
std::optional<at::Tensor> host_value(const at::Tensor& tensor);   // a host tensor with the device tensor's true value
void remember(const at::Tensor& tensor, const at::Tensor& host);  // the device tensor now holds these values
// Remembers parts of one storage that together make up all of it.
void remember_parts(const std::vector<at::Tensor>& parts, const std::vector<at::Tensor>& hosts);
void carry_objects(bool carry);  // whether byte tensors of this thread hold pickled objects
int64_t exchange_limit(at::ScalarType dtype);
void remember_uniform(const at::Tensor& tensor, const at::Scalar& value);
void forget(const at::Tensor& tensor);
at::Scalar plausible(at::ScalarType dtype);  // what an unknown element reads as
void read_to_host(const at::Tensor& host, const at::Tensor& device);
bool is_made_up(
    const c10::Storage& host);  // whether it was filled with plausible values because the true ones are unknown

// What is assumed about an op's result when its inputs are unknown.
enum class Assume : uint8_t { Nothing, AllFinite, True, False, RandomIndices, SameIsEqual, CompareInfinity };

// What Python declares about an op (maya_core/ops/registry.py), by its full name; set at install.
struct OpValues {
  Assume assume = Assume::Nothing;
  bool only_writes = false, keeps_uniform = false, heavy = false, mixes_devices = false;
};
void set_op_values(std::unordered_map<std::string, OpValues> table);
OpValues op_values(const std::string& name, const std::string& overload = "");

struct ValueTraits {  // constant for an op: from its schema, its tags and OpValues
  Assume assume = Assume::Nothing;
  bool computable = true;  // can be computed on the host at all
  bool pointwise = false;  // one uniform input gives one uniform output
  bool heavy = false;      // matmul-like: only tiny ones are computed
  bool random = false;
  int dim_argument = -1;      // which argument is `dim`, if any
  std::vector<bool> written;  // per argument: changed by the op
  std::vector<bool> only_written;
};
ValueTraits value_traits(const c10::OperatorHandle& op);

// Runs the op on the host if all its inputs are known and small. New tensors are returned; for tensors changed in
// place, the shadows are changed.
enum class HostRun : uint8_t {
  NotKnown,  // inputs are unknown or too large: nothing is known about the results
  Failed,    // the host has no kernel for such a call, and never will
  Exact,     // `results` are the op's results
  Uniform,   // `results` have one element that represents all
};
HostRun compute_on_host(const c10::OperatorHandle& op, const ValueTraits& traits, at::ArrayRef<c10::IValue> arguments,
                        int64_t new_elements, torch::jit::Stack& results);
// After the op: forgets what it changed, and assumes what the traits say about results that are unknown.
void assume_outcome(const ValueTraits& traits, at::ArrayRef<c10::IValue> arguments, at::ArrayRef<c10::IValue> returns);

}  // namespace maya
