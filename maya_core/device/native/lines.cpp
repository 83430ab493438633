#include "lines.h"

#include <Python.h>
#include <torch/csrc/utils/pythoncapi_compat.h>  // functions of frames that Python 3.10 does not have

#include <map>
#include <string_view>
#include <unordered_map>

namespace maya {
namespace {

// Accessed only while the GIL is held. Code objects are kept alive, because another one could get a freed one's
// address.
struct Lines {
  std::vector<std::string> libraries;
  std::unordered_map<PyCodeObject*, bool> is_program;
  std::map<std::pair<PyCodeObject*, int>, uint32_t> numbers;  // by code and instruction
  std::vector<std::pair<PyCodeObject*, int>> by_number;
};
Lines& known() {
  static auto* instance = new Lines;
  return *instance;
}

bool is_program(PyCodeObject* code) {
  auto& cache = known().is_program;
  if (auto found = cache.find(code); found != cache.end()) return found->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (!file) PyErr_Clear();
  const std::string_view path = file ? file : "";
  bool wanted = !path.empty() && path.front() != '<';
  for (const auto& folder : known().libraries) wanted = wanted && !path.starts_with(folder);
  Py_INCREF(code);
  return cache[code] = wanted;
}

}  // namespace

namespace {

// The number of the innermost line of the program on a thread's stack, or 0 if there is none.
uint32_t line_on(PyThreadState* state) {
  uint32_t number = 0;
  PyFrameObject* frame = PyThreadState_GetFrame(state);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const bool wanted = is_program(code);
    if (wanted) {
      auto& lines = known();
      const auto [place, fresh] =
          lines.numbers.try_emplace({code, PyFrame_GetLasti(frame)}, uint32_t(lines.by_number.size()) + 1);
      if (fresh) lines.by_number.push_back(place->first);
      number = place->second;
    }
    Py_DECREF(code);
    PyFrameObject* outer = wanted ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return number;
}

PyThreadState* first_thread(PyThreadState* state) {
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(state));
  while (PyThreadState* older = PyThreadState_Next(thread)) thread = older;
  return thread;
}

}  // namespace

namespace {

bool is_of(PyFrameObject* frame, PyCodeObject* code, std::string_view package) {
  static auto* cache = new std::unordered_map<PyCodeObject*, bool>;
  if (auto found = cache->find(code); found != cache->end()) return found->second;
  PyObject* globals = PyFrame_GetGlobals(frame);
  PyObject* name = PyDict_GetItemString(globals, "__name__");
  const char* text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  const bool found = text && std::string_view(text).starts_with(package);
  Py_DECREF(globals);
  Py_INCREF(code);
  return (*cache)[code] = found;
}

void add_stack(PyThreadState* state, std::string_view without, std::vector<std::pair<PyCodeObject*, int>>& stack) {
  PyFrameObject* frame = PyThreadState_GetFrame(state);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_of(frame, code, without)) stack.emplace_back(code, PyFrame_GetLasti(frame));
    Py_DECREF(code);  // the frame keeps a reference
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
}

}  // namespace

std::vector<std::pair<PyCodeObject*, int>> call_stack(const char* without) {
  std::vector<std::pair<PyCodeObject*, int>> stack;
  PyThreadState* state = PyThreadState_Get();
  add_stack(state, without, stack);
  if (PyThreadState* main = first_thread(state); main != state) add_stack(main, without, stack);
  return stack;
}

uint32_t current_line() {
  PyThreadState* state = PyGILState_GetThisThreadState();
  if (!state || !Py_IsInitialized()) return 0;
  const PyGILState_STATE held = PyGILState_Ensure();
  uint32_t number = line_on(state);
  // Autograd's threads work for the main one, which is in backward().
  if (PyThreadState* main = first_thread(state); !number && main != state) number = line_on(main);
  PyGILState_Release(held);
  return number;
}

std::vector<std::string> lines() {
  std::vector<std::string> names{""};
  for (const auto& [code, instruction] : known().by_number) {
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    names.push_back(std::string(file ? file : "?") + ":" + std::to_string(PyCode_Addr2Line(code, instruction)));
  }
  return names;
}

void library_folders(std::vector<std::string> folders) { known().libraries = std::move(folders); }

void forget_lines() {
  known().numbers.clear();
  known().by_number.clear();
}

}  // namespace maya
