// Starting programs, which are in the overlay as well.

#include "overlay.h"

#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <functional>

namespace overlay {
namespace {

// ---- starting programs ----

// The environment of a child, which is in the overlay even if the program has cleared the variables for it.
class Environment {
 public:
  explicit Environment(char* const given[]) : given_(given) {
    auto* own = settings.load(std::memory_order_acquire);
    if (own == nullptr) return;
    const char *variable = nullptr, *preload = nullptr;
    for (auto* each = given; each && *each; ++each) {
      if (strncmp(*each, "MAYA_OVERLAY=", 13) == 0) variable = *each;
      if (strncmp(*each, "LD_PRELOAD=", 11) == 0) preload = *each;
    }
    auto name = own->library.substr(own->library.rfind('/') + 1);
    if (variable && preload && strstr(preload, name.c_str())) return;
    preload_ = "LD_PRELOAD=" + own->library;
    if (preload && strstr(preload, name.c_str())) preload_ = preload;
    else if (preload) preload_ += std::string(":") + (preload + 11);
    entries_ = {const_cast<char*>(variable ? variable : own->variable.c_str()), preload_.data()};
    for (auto* each = given; each && *each; ++each)
      if (*each != variable && *each != preload) entries_.push_back(*each);
    entries_.push_back(nullptr);
  }

  char* const* get() const { return entries_.empty() ? given_ : entries_.data(); }

 private:
  char* const* given_;
  std::string preload_;
  std::vector<char*> entries_;
};

int w_execve(const char* path, char* const arguments[], char* const environment[]) {
  Environment own(environment);
  return read_at(AT_FDCWD, path, true, [&](int, const char* where) { return execve(where, arguments, own.get()); });
}

int w_fexecve(int file, char* const arguments[], char* const environment[]) {
  return fexecve(file, arguments, Environment(environment).get());
}

int w_execv(const char* path, char* const arguments[]) { return w_execve(path, arguments, environ); }

// The places in which the C library looks for a program.
std::vector<std::string> places_of(const char* program) {
  if (strchr(program, '/') || !program[0]) return {program};
  std::vector<std::string> found;
  auto* set = getenv("PATH");
  std::string folders = set ? set : "/bin:/usr/bin";
  for (size_t begin = 0; begin <= folders.size();) {
    auto end = std::min(folders.find(':', begin), folders.size());
    auto folder = folders.substr(begin, end - begin);
    found.push_back(folder.empty() ? program : folder + "/" + program);
    begin = end + 1;
  }
  return found;
}

int w_execvpe(const char* program, char* const arguments[], char* const environment[]) {
  int error = ENOENT;
  for (const auto& path : places_of(program)) {
    w_execve(path.c_str(), arguments, environment);
    if (errno == ENOEXEC) {  // a script that names no interpreter
      std::vector<char*> again{const_cast<char*>("/bin/sh"), const_cast<char*>(path.c_str())};
      for (auto* each = arguments[0] ? arguments + 1 : arguments; *each; ++each) again.push_back(*each);
      again.push_back(nullptr);
      return w_execve("/bin/sh", again.data(), environment);
    }
    if (errno == EACCES) error = EACCES;
    else if (errno != ENOENT && errno != ENOTDIR) return -1;
  }
  return fails(error);
}

int w_execvp(const char* program, char* const arguments[]) { return w_execvpe(program, arguments, environ); }

std::vector<char*> rest_of(const char* first, va_list& arguments) {
  std::vector<char*> all{const_cast<char*>(first)};
  while (all.back()) all.push_back(va_arg(arguments, char*));
  return all;
}

int w_execl(const char* path, const char* first, ...) {
  va_list arguments;
  va_start(arguments, first);
  auto all = rest_of(first, arguments);
  va_end(arguments);
  return w_execv(path, all.data());
}

int w_execlp(const char* program, const char* first, ...) {
  va_list arguments;
  va_start(arguments, first);
  auto all = rest_of(first, arguments);
  va_end(arguments);
  return w_execvp(program, all.data());
}

int w_execle(const char* path, const char* first, ...) {
  va_list arguments;
  va_start(arguments, first);
  auto all = rest_of(first, arguments);
  auto* environment = va_arg(arguments, char* const*);
  va_end(arguments);
  return w_execve(path, all.data(), environment);
}

int w_posix_spawn(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions,
                  const posix_spawnattr_t* attributes, char* const arguments[], char* const environment[]) {
  Environment own(environment);
  Call call(AT_FDCWD, path, true, false);
  if (call.passes()) return posix_spawn(child, path, actions, attributes, arguments, own.get());
  if (!call.place.there()) return ENOENT;
  return posix_spawn(child, call.place.actual().c_str(), actions, attributes, arguments, own.get());
}

int w_posix_spawnp(pid_t* child, const char* program, const posix_spawn_file_actions_t* actions,
                   const posix_spawnattr_t* attributes, char* const arguments[], char* const environment[]) {
  for (const auto& path : places_of(program)) {
    Call call(AT_FDCWD, path.c_str(), true, false);
    if (!call.passes() && call.place.upper)
      return w_posix_spawn(child, path.c_str(), actions, attributes, arguments, environment);
  }
  return posix_spawnp(child, program, actions, attributes, arguments, Environment(environment).get());
}

// The C library starts a shell with the variables of this process.
void put_variables() {
  auto* own = settings.load(std::memory_order_acquire);
  Environment with(environ);
  if (own == nullptr || with.get() == environ) return;
  for (auto* each = with.get(); each < with.get() + 2; ++each) {
    std::string entry = *each;
    auto equals = entry.find('=');
    setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
  }
}

int w_system(const char* command) {
  put_variables();
  return system(command);
}

FILE* w_popen(const char* command, const char* mode) {
  put_variables();
  return popen(command, mode);
}

}  // namespace

const Functions& program_functions() {
  static const Functions table{
      {"execve", address(w_execve)},
      {"fexecve", address(w_fexecve)},
      {"execv", address(w_execv)},
      {"execvp", address(w_execvp)},
      {"execvpe", address(w_execvpe)},
      {"execl", address(w_execl)},
      {"execlp", address(w_execlp)},
      {"execle", address(w_execle)},
      {"posix_spawn", address(w_posix_spawn)},
      {"posix_spawnp", address(w_posix_spawnp)},
      {"system", address(w_system)},
      {"popen", address(w_popen)},
  };
  return table;
}

}  // namespace overlay
