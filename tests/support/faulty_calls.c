/* Faults at the system calls that change files below one folder, or at those that open files to read them;
 * faulty_calls.py says how it is used.
 *
 * Loaded before the C library, it takes the place of the functions that make these calls. Each call is a line of the
 * log: what it does, in which thread, and where. The fault happens at the call of number `place` (from 1). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { RECORD, KILL, TEAR, FAIL, FULL, STALL, STOP };

static char folder[PATH_MAX];
static enum kind kind;
static int reads; /* count the opening of files to read them, and no change */
static long place;
static atomic_long calls;
static int journal = -1;
static char claimed[PATH_MAX]; /* the log of which the first process with such a call makes itself the owner */

void faulty_calls_begin(const char *below, int what, long at, const char *log, int reading) {
    journal = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    kind = (enum kind)what;
    place = at;
    reads = reading;
    calls = 0;
    strncpy(folder, below, sizeof folder - 1);
}

/* A process that is started with FAULTY_CALLS meets the fault that it names, if it is the first to make such a call. */
__attribute__((constructor)) static void begin_by_environment(void) {
    const char *request = getenv("FAULTY_CALLS");
    if (request != NULL)
        sscanf(request, "%d %ld %4095s %4095s", (int *)&kind, &place, claimed, folder);
}

static void resolve(int base, const char *path, char *full) {
    char link[64];
    ssize_t length = 0;
    int end = 0;
    full[0] = 0;
    if (path != NULL && sscanf(path, "/proc/self/fd/%d/%n", &base, &end) == 1 && end > 0)
        path += end; /* a path below a folder that is open */
    if (path == NULL || path[0] != '/') {
        if (base == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", base);
        length = readlink(link, full, PATH_MAX - 1);
        full[length < 0 ? 0 : length] = 0;
    }
    if (path != NULL)
        snprintf(full + strlen(full), (size_t)PATH_MAX - strlen(full), "%s%s", path[0] == '/' ? "" : "/", path);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Count a call; return the error with which it fails, 0 if it happens, or -1 if half of it does and the process dies. */
static int reach(const char *name, int grows, int base, const char *path) {
    char full[PATH_MAX], line[PATH_MAX + 16];
    size_t length = strlen(folder);
    int earlier = errno;
    if (length == 0 || reads != (strcmp(name, "open") == 0))
        return 0;
    resolve(base, path, full);
    errno = earlier;
    if (strncmp(full, folder, length) != 0 || (full[length] != '/' && full[length] != 0))
        return 0;
    if (claimed[0]) {
        journal = (int)syscall(SYS_openat, AT_FDCWD, claimed, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        claimed[0] = 0;
        if (journal < 0) {
            folder[0] = 0;
            return 0;
        }
    }
    long number = ++calls;
    const char *thread = syscall(SYS_gettid) == getpid() ? "main" : "thread";
    int size = snprintf(line, sizeof line, "%s %s %s\n", name, thread, full);
    syscall(SYS_write, journal, line, (size_t)size);
    if (kind == FULL && grows && number >= place)
        return ENOSPC;
    if (number != place || kind == RECORD)
        return 0;
    if (kind == TEAR && strcmp(name, "write") == 0)
        return -1;
    if (kind == STALL)
        usleep(50000); /* the other threads go on */
    if (kind == KILL || kind == TEAR || kind == STALL)
        die();
    if (kind == STOP)
        kill(getpid(), SIGSTOP);
    return kind == FAIL ? EIO : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MEET(...)                                                                                                      \
    do {                                                                                                               \
        int error_ = reach(__VA_ARGS__);                                                                               \
        if (error_ > 0) {                                                                                              \
            errno = error_;                                                                                            \
            return -1;                                                                                                 \
        }                                                                                                              \
    } while (0)

static int opened(int base, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    struct stat found;
    resolve(base, path, full);
    int missing = (flags & O_CREAT) && stat(full, &found) != 0;
    if (missing)
        MEET("create", 1, base, path);
    else if (flags & O_TRUNC)
        MEET("truncate", 0, base, path);
    else if ((flags & (O_ACCMODE | O_DIRECTORY)) == O_RDONLY && stat(full, &found) == 0 && S_ISREG(found.st_mode))
        MEET("open", 0, base, path);
    return (int)syscall(SYS_openat, base, path, flags, mode);
}

#define MODE(flags, mode)                                                                                              \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    return opened(AT_FDCWD, path, flags, mode);
}

int openat(int base, const char *path, int flags, ...) {
    MODE(flags, mode)
    return opened(base, path, flags, mode);
}

int openat64(int base, const char *path, int flags, ...) {
    MODE(flags, mode)
    return opened(base, path, flags, mode);
}

ssize_t write(int file, const void *bytes, size_t size) {
    int error = reach("write", 1, file, NULL);
    if (error < 0) {
        syscall(SYS_write, file, bytes, size / 2);
        die();
    }
    if (error > 0) {
        errno = error;
        return -1;
    }
    return syscall(SYS_write, file, bytes, size);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    MEET("pwrite", 1, file, NULL);
    return syscall(SYS_pwrite64, file, bytes, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    MEET("writev", 1, file, NULL);
    return syscall(SYS_writev, file, parts, count);
}

int ftruncate64(int file, off64_t size) {
    MEET("ftruncate", 0, file, NULL);
    return REAL(ftruncate64)(file, size);
}

int fsync(int file) {
    MEET("fsync", 0, file, NULL);
    return (int)syscall(SYS_fsync, file);
}

int fdatasync(int file) {
    MEET("fdatasync", 0, file, NULL);
    return (int)syscall(SYS_fdatasync, file);
}

int rename(const char *from, const char *to) {
    MEET("rename", 0, AT_FDCWD, to);
    return REAL(rename)(from, to);
}

int renameat(int one, const char *from, int two, const char *to) {
    MEET("rename", 0, two, to);
    return REAL(renameat)(one, from, two, to);
}

int renameat2(int one, const char *from, int two, const char *to, unsigned flags) {
    MEET("exchange", 0, two, to);
    return (int)syscall(SYS_renameat2, one, from, two, to, flags);
}

int unlink(const char *path) {
    MEET("unlink", 0, AT_FDCWD, path);
    return REAL(unlink)(path);
}

int unlinkat(int base, const char *path, int flags) {
    MEET("unlink", 0, base, path);
    return REAL(unlinkat)(base, path, flags);
}

int rmdir(const char *path) {
    MEET("rmdir", 0, AT_FDCWD, path);
    return REAL(rmdir)(path);
}

int mkdir(const char *path, mode_t mode) {
    MEET("mkdir", 1, AT_FDCWD, path);
    return REAL(mkdir)(path, mode);
}

int mkdirat(int base, const char *path, mode_t mode) {
    MEET("mkdir", 1, base, path);
    return REAL(mkdirat)(base, path, mode);
}

int link(const char *from, const char *to) {
    MEET("link", 1, AT_FDCWD, to);
    return REAL(link)(from, to);
}

int symlink(const char *to, const char *path) {
    MEET("symlink", 1, AT_FDCWD, path);
    return REAL(symlink)(to, path);
}

ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags) {
    MEET("copy", 1, to, NULL);
    return syscall(SYS_copy_file_range, from, at, to, there, size, flags);
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    MEET("copy", 1, to, NULL);
    return syscall(SYS_sendfile, to, from, at, size);
}
