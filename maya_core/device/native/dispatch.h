// How ops reach the emulated device. Every op that has a CUDA kernel in a CUDA build of torch gets one of ours: it
// looks the call up by the metadata of its arguments, asks torch's Meta kernel once per new call what comes out, and
// from then on allocates, remembers values and records.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "device.h"

namespace maya {

// What one kind of call does on the device, from the planner (maya_core/device/planner.py).
struct Plan {
  enum Step : int64_t { Output = 0, Temporary = 1, FreeTemporary = 2, BlasWorkspace = 3, HostOutput = 4, Storage = 5 };
  uint32_t call = 0;  // its number in the trace
  bool has_program = false;
  std::vector<std::pair<int64_t, int64_t>> program;  // (Step, bytes or index) in the order the kernel allocates
};

void register_kernels(const std::vector<std::string>& cuda_ops, const std::vector<std::string>& sparse_ops);
void unregister_kernels();

// The Python side of a cache miss and of ops with a Python rule; set by bindings.cpp.
struct PythonSide {
  virtual ~PythonSide() = default;
  virtual Plan plan(const std::string& op, const c10::FunctionSchema* schema, at::ArrayRef<c10::IValue> arguments,
                    at::ArrayRef<c10::IValue> returns, uint64_t settings) = 0;
  virtual bool has_rule(const std::string& op) = 0;
  virtual void call_rule(const std::string& op, const c10::FunctionSchema& schema, torch::jit::Stack* stack) = 0;
  virtual std::optional<std::string> not_implemented(
      std::exception_ptr raised) = 0;  // by a Meta kernel written in Python
  virtual std::string no_rule_message(const std::string& op, const std::string& reason) = 0;
};
void set_python_side(std::unique_ptr<PythonSide> side);

// Switches of torch that decide which kernel runs, a bit each in this order; maya_core/trace/call.py's Settings has the
// same names.
std::vector<std::string> setting_names();
void set_default_settings(
    uint64_t bits);  // as torch starts with: what calls carry that no switch but determinism matters to

// Records a call that torch's dispatcher did not route through a kernel of ours (copies, fills, rules).
void record_call(const std::string& op, at::ArrayRef<c10::IValue> arguments, at::ArrayRef<c10::IValue> returns);

// Puts a call in the trace's table that no event refers to.
void note_call(const std::string& op, at::ArrayRef<c10::IValue> arguments);

int64_t distinct_calls();
int64_t calls();

}  // namespace maya
