// Lines of the program: where in the user's own Python an allocation comes from.
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
// The calling stack as (code, instruction), innermost first, without frames of modules of that name's. Autograd's
// threads go on below the main one, which is in backward(). With the GIL held.
std::vector<std::pair<PyCodeObject*, int>> call_stack(const char* without);
void library_folders(std::vector<std::string> folders);  // whose lines are not the program's

}  // namespace maya
