// Lines of the program: where in the user's own Python an allocation comes from.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace maya {

uint32_t current_line();           // the innermost line outside torch and Maya, as a number; 0 if this thread runs no Python
std::vector<std::string> lines();  // file:line, by number
void forget_lines();
void library_folders(std::vector<std::string> folders);  // whose lines are not the program's

}  // namespace maya
