// Files: opening, reading, copying and changing them, and sockets with a path.

#include "overlay.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <utime.h>

#include <functional>

namespace overlay {

int open_at(int folder, const char* path, int flags, mode_t mode) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
  Call call(folder, path, !(flags & (O_NOFOLLOW | O_EXCL)), writes);
  if (call.passes()) return openat(folder, path, flags, mode);
  auto& place = call.place;
  struct stat found{};
  auto actual = place.actual();
  bool plain =
      !place.there() || (lstat(actual.c_str(), &found) == 0 && (S_ISREG(found.st_mode) || S_ISLNK(found.st_mode)));
  bool changes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) || ((flags & O_CREAT) && !place.there());
  if ((flags & O_TMPFILE) == O_TMPFILE && place.lower && is_protected(place)) {  // it may get a name later
    begin_writing();
    return make_folders(upper_of(place.path)) ? open(upper_of(place.path).c_str(), flags, mode) : -1;
  }
  if (!changes || !plain) {
    if (!place.there() && !exists(place.path)) return openat(folder, path, flags, mode);  // fails as it really does
    if (!place.there()) return fails(ENOENT);
    return open(actual.c_str(), flags, mode);
  }
  if (!is_protected(place)) return openat(folder, path, flags, mode);
  if (!place.there() && !(flags & O_CREAT)) return fails(ENOENT);
  if (place.there() && (flags & O_CREAT) && (flags & O_EXCL)) return fails(EEXIST);
  if (place.lower && !place.upper) {
    if (access(place.path.c_str(), W_OK) != 0) return -1;
    if (flags & O_TRUNC ? !prepare(place) : !bring(place)) return -1;
    flags |= O_CREAT;
    mode = found.st_mode & 07777;
  } else if (!place.there() && !prepare(place)) {
    return -1;
  }
  return open(upper_of(place.path).c_str(), flags, mode);
}

// Runs `make` with names that end, before a suffix, in random letters instead of XXXXXX, until one is new.
int make_unique(char* name, int suffix, const std::function<int()>& make) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  auto length = ssize_t(strlen(name)) - suffix - 6;
  if (length < 0 || strncmp(name + length, "XXXXXX", 6) != 0) return fails(EINVAL);
  for (int attempt = 0; attempt < 10000; ++attempt) {
    unsigned char random[6];
    if (getrandom(random, sizeof random, 0) != sizeof random) return -1;
    for (int each = 0; each < 6; ++each) name[length + each] = letters[random[each] % (sizeof letters - 1)];
    int made = make();
    if (made >= 0 || errno != EEXIST) return made;
  }
  return -1;
}

namespace {

// ---- opening ----

mode_t mode_argument(int flags, va_list arguments) {
  return flags & (O_CREAT | O_TMPFILE) ? mode_t(va_arg(arguments, int)) : 0;
}

int w_open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  auto mode = mode_argument(flags, arguments);
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags, mode);
}

int w_openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  auto mode = mode_argument(flags, arguments);
  va_end(arguments);
  return open_at(folder, path, flags, mode);
}

int w_open_2(const char* path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int w_openat_2(int folder, const char* path, int flags) { return open_at(folder, path, flags, 0); }
int w_creat(const char* path, mode_t mode) { return open_at(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

int w_mkostemps(char* name, int suffix, int flags) {
  flags = (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL;
  return make_unique(name, suffix, [=] { return open_at(AT_FDCWD, name, flags, 0600); });
}

int w_mkstemps(char* name, int suffix) { return w_mkostemps(name, suffix, 0); }
int w_mkostemp(char* name, int flags) { return w_mkostemps(name, 0, flags); }
int w_mkstemp(char* name) { return w_mkostemps(name, 0, 0); }

// The flags of a mode such as "r+b"; -1 if it is none.
int flags_of(const char* mode) {
  bool both = strchr(mode, '+') != nullptr;
  int flags = both ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
  if (mode[0] == 'w') flags |= O_CREAT | O_TRUNC;
  if (mode[0] == 'a') flags |= O_CREAT | O_APPEND;
  if (strchr(mode, 'x')) flags |= O_EXCL;
  if (strchr(mode, 'e')) flags |= O_CLOEXEC;
  return strchr("rwa", mode[0]) ? flags : -1;
}

FILE* w_fopen(const char* path, const char* mode) {
  int flags = settings.load() == nullptr ? -1 : flags_of(mode);
  if (flags < 0) return fopen(path, mode);
  int file = open_at(AT_FDCWD, path, flags, 0666);
  if (file < 0) return nullptr;
  auto* stream = fdopen(file, mode);
  if (stream == nullptr) close(file);
  return stream;
}

FILE* w_freopen(const char* path, const char* mode, FILE* stream) {
  int flags = path == nullptr || settings.load() == nullptr ? -1 : flags_of(mode);
  if (flags < 0) return freopen(path, mode, stream);
  int file = open_at(AT_FDCWD, path, flags | O_CLOEXEC, 0666);
  if (file < 0) return nullptr;
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  auto* again = freopen(name, mode[0] == 'w' ? "r+" : mode, stream);  // it is empty already
  close(file);
  return again;
}

// ---- calls that read ----

int w_fstatat(int folder, const char* path, struct stat* found, int flags) {
  if ((flags & AT_EMPTY_PATH) && path && !path[0]) return fstatat(folder, path, found, flags);
  return read_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                 [=](int at, const char* where) { return fstatat(at, where, found, flags); });
}

int w_stat(const char* path, struct stat* found) { return w_fstatat(AT_FDCWD, path, found, 0); }
int w_lstat(const char* path, struct stat* found) { return w_fstatat(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int w_xstat(int, const char* path, struct stat* found) { return w_stat(path, found); }
int w_lxstat(int, const char* path, struct stat* found) { return w_lstat(path, found); }
int w_fxstatat(int, int folder, const char* path, struct stat* found, int flags) {
  return w_fstatat(folder, path, found, flags);
}

int w_statx(int folder, const char* path, int flags, unsigned mask, struct statx* found) {
  if (path == nullptr || ((flags & AT_EMPTY_PATH) && !path[0])) return statx(folder, path, flags, mask, found);
  return read_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                 [=](int at, const char* where) { return statx(at, where, flags, mask, found); });
}

int w_faccessat(int folder, const char* path, int mode, int flags) {
  return read_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                 [=](int at, const char* where) { return faccessat(at, where, mode, flags); });
}

int w_access(const char* path, int mode) { return w_faccessat(AT_FDCWD, path, mode, 0); }
int w_eaccess(const char* path, int mode) { return w_faccessat(AT_FDCWD, path, mode, AT_EACCESS); }

ssize_t w_readlinkat(int folder, const char* path, char* target, size_t size) {
  if (path && !path[0]) return readlinkat(folder, path, target, size);
  return read_at(folder, path, false, [=](int at, const char* where) { return readlinkat(at, where, target, size); });
}

ssize_t w_readlink(const char* path, char* target, size_t size) { return w_readlinkat(AT_FDCWD, path, target, size); }
ssize_t w_readlink_chk(const char* path, char* target, size_t size, size_t) { return w_readlink(path, target, size); }
ssize_t w_readlinkat_chk(int folder, const char* path, char* target, size_t size, size_t) {
  return w_readlinkat(folder, path, target, size);
}

int w_statfs(const char* path, struct statfs* found) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return statfs(where, found); });
}

int w_statvfs(const char* path, struct statvfs* found) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return statvfs(where, found); });
}

ssize_t w_getxattr(const char* path, const char* name, void* value, size_t size) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return getxattr(where, name, value, size); });
}

ssize_t w_lgetxattr(const char* path, const char* name, void* value, size_t size) {
  return read_at(AT_FDCWD, path, false, [=](int, const char* where) { return lgetxattr(where, name, value, size); });
}

ssize_t w_listxattr(const char* path, char* names, size_t size) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return listxattr(where, names, size); });
}

ssize_t w_llistxattr(const char* path, char* names, size_t size) {
  return read_at(AT_FDCWD, path, false, [=](int, const char* where) { return llistxattr(where, names, size); });
}

int w_chdir(const char* path) {
  return read_at(AT_FDCWD, path, true, [](int, const char* where) { return chdir(where); });
}

char* w_getcwd(char* here, size_t size) {
  auto* own = settings.load(std::memory_order_acquire);
  auto* real = getcwd(here, size);
  if (own == nullptr || real == nullptr || !below(real, own->files)) return real;
  auto seen = as_seen(*own, real);
  memcpy(real, seen.c_str(), seen.size() + 1);
  return real;
}

char* w_getcwd_chk(char* here, size_t size, size_t) { return w_getcwd(here, size); }

char* w_realpath(const char* path, char* resolved) {
  Call call(AT_FDCWD, path, true, false);
  if (call.passes()) return realpath(path, resolved);
  if (!call.place.there()) {
    errno = ENOENT;
    return nullptr;
  }
  if (resolved == nullptr) return strdup(call.place.path.c_str());
  if (call.place.path.size() >= PATH_MAX) {
    errno = ENAMETOOLONG;
    return nullptr;
  }
  return strcpy(resolved, call.place.path.c_str());
}

char* w_realpath_chk(const char* path, char* resolved, size_t) { return w_realpath(path, resolved); }
char* w_canonical(const char* path) { return w_realpath(path, nullptr); }

// ---- sockets with a path ----

// Runs `act` on an address. Longer paths than an address may have are given by a descriptor of their folder.
template <typename Act>
int at_socket(const sockaddr* address, socklen_t size, bool makes, Act act) {
  constexpr auto before = offsetof(sockaddr_un, sun_path);
  if (address == nullptr || size <= before || address->sa_family != AF_UNIX) return act(address, size);
  auto* given = reinterpret_cast<const sockaddr_un*>(address);
  std::string path(given->sun_path, strnlen(given->sun_path, size - before));
  Call call(AT_FDCWD, path.c_str(), true, makes);
  if (call.passes()) return act(address, size);
  auto& place = call.place;
  if (makes ? !place.upper && !is_protected(place) : !place.upper) return act(address, size);
  if (makes && place.there()) return fails(EADDRINUSE);
  if (makes && !prepare(place)) return -1;
  auto where = upper_of(place.path);
  int folder = -1;
  if (where.size() >= sizeof given->sun_path) {
    folder = open(folder_of(where).c_str(), O_PATH | O_CLOEXEC);
    where = "/proc/self/fd/" + std::to_string(folder) + where.substr(where.rfind('/'));
  }
  sockaddr_un real{AF_UNIX, {}};
  int done = where.size() < sizeof real.sun_path ? 0 : fails(ENAMETOOLONG);
  if (done == 0) {
    memcpy(real.sun_path, where.c_str(), where.size() + 1);
    done = act(reinterpret_cast<const sockaddr*>(&real), socklen_t(before + where.size() + 1));
  }
  int error = errno;
  if (folder >= 0) close(folder);
  errno = error;
  return done;
}

int w_bind(int socket, const sockaddr* address, socklen_t size) {
  return at_socket(address, size, true, [=](const sockaddr* at, socklen_t bytes) { return bind(socket, at, bytes); });
}

int w_connect(int socket, const sockaddr* address, socklen_t size) {
  return at_socket(address, size, false,
                   [=](const sockaddr* at, socklen_t bytes) { return connect(socket, at, bytes); });
}

// ---- copying ----

// Leaves out a hole of a file that the program copies to the end of another, such as a checkpoint. Returns its bytes;
// if there is none, lets `count` end where the next one begins.
size_t skip_hole(int from, off_t begin, int to, off_t end, size_t& count) {
  struct stat source, target;
  if (settings.load() == nullptr || begin < 0 || end < 0 || fstat(from, &source) != 0 || fstat(to, &target) != 0 ||
      !S_ISREG(source.st_mode) || !S_ISREG(target.st_mode) || off_t(source.st_blocks) * 512 >= source.st_size ||
      begin >= source.st_size || end < target.st_size)
    return 0;
  auto before = lseek(from, 0, SEEK_CUR);
  auto data = lseek(from, begin, SEEK_DATA);
  if (data < 0 && errno == ENXIO) data = source.st_size;
  auto hole = data == begin ? lseek(from, begin, SEEK_HOLE) : begin;
  lseek(from, before, SEEK_SET);
  if (data < 0 || hole < 0) return 0;
  if (data == begin) {
    count = std::min(count, size_t(hole - begin));
    return 0;
  }
  auto skipped = std::min(count, size_t(data - begin));
  return ftruncate(to, end + off_t(skipped)) == 0 ? skipped : 0;
}

ssize_t w_sendfile(int to, int from, off_t* offset, size_t count) {
  auto begin = offset ? *offset : lseek(from, 0, SEEK_CUR), end = lseek(to, 0, SEEK_CUR);
  auto skipped = skip_hole(from, begin, to, end, count);
  if (skipped == 0) return sendfile(to, from, offset, count);
  lseek(to, end + off_t(skipped), SEEK_SET);
  if (offset) *offset += off_t(skipped);
  else lseek(from, begin + off_t(skipped), SEEK_SET);
  return ssize_t(skipped);
}

ssize_t w_copy_file_range(int from, off64_t* offset, int to, off64_t* target, size_t count, unsigned flags) {
  auto begin = offset ? *offset : lseek(from, 0, SEEK_CUR), end = target ? *target : lseek(to, 0, SEEK_CUR);
  auto skipped = skip_hole(from, begin, to, end, count);
  if (skipped == 0) return copy_file_range(from, offset, to, target, count, flags);
  if (offset) *offset += off_t(skipped);
  else lseek(from, begin + off_t(skipped), SEEK_SET);
  if (target) *target += off_t(skipped);
  else lseek(to, end + off_t(skipped), SEEK_SET);
  return ssize_t(skipped);
}

// ---- changing what a file is ----

// Runs `act` on the overlay's copy of a file. Folders keep what they are.
template <typename Act>
int change_at(int folder, const char* path, bool follow, Act act) {
  Call call(folder, path, follow, true);
  auto& place = call.place;
  if (call.passes() || (place.there() && !is_protected(place))) return act(folder, path);
  if (!place.there()) return fails(ENOENT);
  if (place.lower && is_folder(place.path)) return 0;
  if (!bring(place)) return -1;
  return act(AT_FDCWD, upper_of(place.path).c_str());
}

// The same for a file that is open. What is open for writing is in the overlay already; what is open for reading may be
// the user's.
template <typename Act, typename Pass>
int change_open(int descriptor, Act act, Pass pass) {
  auto* own = settings.load(std::memory_order_acquire);
  auto path = own == nullptr ? "" : at_descriptor(descriptor);
  if (path.empty() || below(path, own->files) || !exists(path)) return pass();
  return change_at(AT_FDCWD, path.c_str(), false, [=](int, const char* where) { return act(where); });
}

int w_fchmod(int file, mode_t mode) {
  return change_open(file, [=](const char* where) { return chmod(where, mode); }, [=] { return fchmod(file, mode); });
}

int w_fchown(int file, uid_t user, gid_t group) {
  return change_open(
      file, [=](const char* where) { return lchown(where, user, group); }, [=] { return fchown(file, user, group); });
}

int w_futimens(int file, const timespec times[2]) {
  return change_open(
      file, [=](const char* where) { return utimensat(AT_FDCWD, where, times, AT_SYMLINK_NOFOLLOW); },
      [=] { return futimens(file, times); });
}

int w_futimes(int file, const timeval times[2]) {
  return change_open(
      file, [=](const char* where) { return utimes(where, times); }, [=] { return futimes(file, times); });
}

int w_fsetxattr(int file, const char* name, const void* value, size_t size, int flags) {
  return change_open(
      file, [=](const char* where) { return setxattr(where, name, value, size, flags); },
      [=] { return fsetxattr(file, name, value, size, flags); });
}

int w_fremovexattr(int file, const char* name) {
  return change_open(
      file, [=](const char* where) { return removexattr(where, name); }, [=] { return fremovexattr(file, name); });
}

int w_truncate(const char* path, off_t length) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return truncate(where, length); });
}

int w_fchmodat(int folder, const char* path, mode_t mode, int flags) {
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return fchmodat(at, where, mode, flags); });
}

int w_chmod(const char* path, mode_t mode) { return w_fchmodat(AT_FDCWD, path, mode, 0); }

int w_fchownat(int folder, const char* path, uid_t user, gid_t group, int flags) {
  if ((flags & AT_EMPTY_PATH) && path && !path[0]) return w_fchown(folder, user, group);
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return fchownat(at, where, user, group, flags); });
}

int w_chown(const char* path, uid_t user, gid_t group) { return w_fchownat(AT_FDCWD, path, user, group, 0); }
int w_lchown(const char* path, uid_t user, gid_t group) {
  return w_fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW);
}

int w_utimensat(int folder, const char* path, const timespec times[2], int flags) {
  if (path == nullptr) return w_futimens(folder, times);
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return utimensat(at, where, times, flags); });
}

int w_utimes(const char* path, const timeval times[2]) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return utimes(where, times); });
}

int w_lutimes(const char* path, const timeval times[2]) {
  return change_at(AT_FDCWD, path, false, [=](int, const char* where) { return lutimes(where, times); });
}

int w_utime(const char* path, const utimbuf* times) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return utime(where, times); });
}

int w_setxattr(const char* path, const char* name, const void* value, size_t size, int flags) {
  return change_at(AT_FDCWD, path, true,
                   [=](int, const char* where) { return setxattr(where, name, value, size, flags); });
}

int w_lsetxattr(const char* path, const char* name, const void* value, size_t size, int flags) {
  return change_at(AT_FDCWD, path, false,
                   [=](int, const char* where) { return lsetxattr(where, name, value, size, flags); });
}

int w_lremovexattr(const char* path, const char* name) {
  return change_at(AT_FDCWD, path, false, [=](int, const char* where) { return lremovexattr(where, name); });
}

int w_removexattr(const char* path, const char* name) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return removexattr(where, name); });
}

}  // namespace

const Functions& file_functions() {
  static const Functions table{
      {"open", address(w_open)},
      {"open64", address(w_open)},
      {"__open_2", address(w_open_2)},
      {"__open64_2", address(w_open_2)},
      {"openat", address(w_openat)},
      {"openat64", address(w_openat)},
      {"__openat_2", address(w_openat_2)},
      {"__openat64_2", address(w_openat_2)},
      {"creat", address(w_creat)},
      {"creat64", address(w_creat)},
      {"fopen", address(w_fopen)},
      {"fopen64", address(w_fopen)},
      {"freopen", address(w_freopen)},
      {"freopen64", address(w_freopen)},
      {"stat", address(w_stat)},
      {"stat64", address(w_stat)},
      {"lstat", address(w_lstat)},
      {"lstat64", address(w_lstat)},
      {"fstatat", address(w_fstatat)},
      {"fstatat64", address(w_fstatat)},
      {"__xstat", address(w_xstat)},
      {"__xstat64", address(w_xstat)},
      {"__lxstat", address(w_lxstat)},
      {"__lxstat64", address(w_lxstat)},
      {"__fxstatat", address(w_fxstatat)},
      {"__fxstatat64", address(w_fxstatat)},
      {"statx", address(w_statx)},
      {"access", address(w_access)},
      {"faccessat", address(w_faccessat)},
      {"eaccess", address(w_eaccess)},
      {"euidaccess", address(w_eaccess)},
      {"readlink", address(w_readlink)},
      {"__readlink_chk", address(w_readlink_chk)},
      {"readlinkat", address(w_readlinkat)},
      {"__readlinkat_chk", address(w_readlinkat_chk)},
      {"statfs", address(w_statfs)},
      {"statfs64", address(w_statfs)},
      {"statvfs", address(w_statvfs)},
      {"statvfs64", address(w_statvfs)},
      {"getxattr", address(w_getxattr)},
      {"lgetxattr", address(w_lgetxattr)},
      {"listxattr", address(w_listxattr)},
      {"llistxattr", address(w_llistxattr)},
      {"chdir", address(w_chdir)},
      {"getcwd", address(w_getcwd)},
      {"__getcwd_chk", address(w_getcwd_chk)},
      {"realpath", address(w_realpath)},
      {"__realpath_chk", address(w_realpath_chk)},
      {"canonicalize_file_name", address(w_canonical)},
      {"truncate", address(w_truncate)},
      {"truncate64", address(w_truncate)},
      {"chmod", address(w_chmod)},
      {"fchmodat", address(w_fchmodat)},
      {"chown", address(w_chown)},
      {"lchown", address(w_lchown)},
      {"fchownat", address(w_fchownat)},
      {"utimensat", address(w_utimensat)},
      {"utimes", address(w_utimes)},
      {"lutimes", address(w_lutimes)},
      {"utime", address(w_utime)},
      {"setxattr", address(w_setxattr)},
      {"lsetxattr", address(w_lsetxattr)},
      {"removexattr", address(w_removexattr)},
      {"mkstemp", address(w_mkstemp)},
      {"mkstemp64", address(w_mkstemp)},
      {"mkostemp", address(w_mkostemp)},
      {"mkostemp64", address(w_mkostemp)},
      {"mkstemps", address(w_mkstemps)},
      {"mkstemps64", address(w_mkstemps)},
      {"mkostemps", address(w_mkostemps)},
      {"mkostemps64", address(w_mkostemps)},
      {"bind", address(w_bind)},
      {"connect", address(w_connect)},
      {"sendfile", address(w_sendfile)},
      {"sendfile64", address(w_sendfile)},
      {"copy_file_range", address(w_copy_file_range)},
      {"fchmod", address(w_fchmod)},
      {"fchown", address(w_fchown)},
      {"futimens", address(w_futimens)},
      {"futimes", address(w_futimes)},
      {"fsetxattr", address(w_fsetxattr)},
      {"fremovexattr", address(w_fremovexattr)},
      {"lremovexattr", address(w_lremovexattr)},
  };
  return table;
}

}  // namespace overlay
