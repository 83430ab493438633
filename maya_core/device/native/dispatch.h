// How ops reach the emulated device. Every op that has a CUDA kernel in a CUDA build of torch gets a kernel here. It
// looks up the call by the metadata of its arguments; for a new call, torch's Meta kernel says what the results are.
// Then it allocates the results, remembers values and records the call.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "device.h"

namespace maya {

// What a distinct call does on the device, from the planner (maya_core/device/planner.py).
struct Plan {
  enum Step : int64_t {
    Output = 0,
    Temporary = 1,
    FreeTemporary = 2,
    BlasWorkspace = 3,
    HostOutput = 4,
    Storage = 5,
    LtWorkspace = 6
  };
  uint32_t call = 0;  // its number in the trace
  bool has_program = false;
  std::vector<std::pair<int64_t, int64_t>> program;  // (Step, bytes or index) in the order the kernel allocates
};

void register_kernels(const OpNames& ops);
void unregister_kernels();

// What Python does for a new call and for ops with a Python rule; set by bindings.cpp.
struct PythonSide {
  virtual ~PythonSide() = default;
  virtual Plan plan(const std::string& op, const c10::FunctionSchema* schema, at::ArrayRef<c10::IValue> arguments,
                    at::ArrayRef<c10::IValue> returns, uint64_t settings) = 0;
  virtual bool has_rule(const std::string& op) = 0;
  virtual void call_rule(const std::string& op, const c10::FunctionSchema& schema, torch::jit::Stack* stack) = 0;
  // The reason if a Meta kernel written in Python raised NotImplementedError.
  virtual std::optional<std::string> not_implemented(std::exception_ptr raised) = 0;
  virtual std::string no_rule_message(const std::string& op, const std::string& reason) = 0;
};
void set_python_side(std::unique_ptr<PythonSide> side);

// The switches of torch that decide which kernel runs, one bit each in this order. TorchSettings in
// maya_core/trace/call.py has the same names.
std::vector<std::string> setting_names();
// The settings with which torch starts. Calls that depend on no switch but determinism are recorded with them.
void set_default_settings(uint64_t bits);

// Records a call that did not come through the dispatcher to a kernel of dispatch.cpp (copies, fills, rules).
void record_call(const std::string& op, at::ArrayRef<c10::IValue> arguments, at::ArrayRef<c10::IValue> returns);

// Adds a call to the trace's table without an event that refers to it.
void note_call(const std::string& op, at::ArrayRef<c10::IValue> arguments);

int64_t distinct_calls();
int64_t calls();

}  // namespace maya
