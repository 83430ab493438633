// Lines of the program: which line of the user's own Python code makes an allocation.
#pragma once
#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace maya {

uint32_t current_line();  // the innermost line outside torch and Maya, as a number; 0 if this thread runs no Python
std::vector<std::string> lines();  // file:line, by number
void forget_lines();
// The call stack as (code, instruction), innermost first, without frames of the module `without`. The stack of an
// autograd thread continues with that of the main thread, which is in backward(). The GIL must be held.
std::vector<std::pair<PyCodeObject*, int>> call_stack(const char* without);
void library_folders(std::vector<std::string> folders);  // lines of code in them are not the program's

}  // namespace maya
