/* Logs what a process does to the files of one folder, so that tests/powercut.py can build the disks
 * that a power cut might have left.
 *
 *   POWERCUT_FOLDER  absolute path of the folder that is watched
 *   POWERCUT_LOG     file to append the log to, if there is to be one
 *   POWERCUT_LIES    if set, syncs report success and do nothing: the drive that lies
 *
 * A record is a struct rec and `len` bytes behind it. A write and a change of names is logged after it
 * returned, a sync when it begins and when it has ended: only what was written before its beginning is
 * safe after its end. Stores through a writable shared map, and calls that copy inside the kernel, cannot
 * be seen; they are logged as UNSEEN, and the test fails.
 *
 * powercut_fail makes chosen writes, syncs and allocations of the folder's files fail, or write half.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    WRITE = 1, SYNC_BEGIN, SYNC_END, SIZE, ZERO, CREATE, UNLINK, RENAME, MKDIR, FOLDER_SYNC_BEGIN,
    FOLDER_SYNC_END, MARK, UNSEEN
};

struct rec {
    uint32_t kind, thread;
    uint64_t file, offset, len;
};

static int log_fd = -1;
static int lies;
static long calls, fail_from = -1, fail_until;
static int fail_error;
static char folder[PATH_MAX];
static size_t folder_len;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("POWERCUT_LOG"), *where = getenv("POWERCUT_FOLDER");
    if (!where) return;
    lies = getenv("POWERCUT_LIES") != NULL;
    snprintf(folder, sizeof folder, "%s", where);
    folder_len = strlen(folder);
    if (!path) return;
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    /* LMDB, libc and Python must not inherit it, nor close it by accident. */
    int high = fcntl(log_fd, F_DUPFD_CLOEXEC, 900);
    if (high >= 0) { close(log_fd); log_fd = high; }
}

static void put(uint32_t kind, uint64_t file, uint64_t offset, const struct iovec *parts, int count, size_t len) {
    struct rec head = {kind, (uint32_t)syscall(SYS_gettid), file, offset, len};
    if (log_fd < 0) return;
    int saved = errno;
    pthread_mutex_lock(&lock);
    if (syscall(SYS_write, log_fd, &head, sizeof head) != (long)sizeof head) abort();
    for (int i = 0; i < count && len; i++) {
        size_t part = parts[i].iov_len < len ? parts[i].iov_len : len;
        for (size_t done = 0; done < part;) {
            long n = syscall(SYS_write, log_fd, (char *)parts[i].iov_base + done, part - done);
            if (n <= 0) abort();
            done += n;
        }
        len -= part;
    }
    pthread_mutex_unlock(&lock);
    errno = saved;
}

static void put_text(uint32_t kind, uint64_t file, const char *text) {
    struct iovec part = {(void *)text, strlen(text)};
    put(kind, file, 0, &part, 1, part.iov_len);
}

/* LMDB's reader table is rebuilt at the first open after a boot, and lives in a shared map. */
static int watched_path(const char *path) {
    size_t n = strlen(path);
    if (strncmp(path, folder, folder_len) || (path[folder_len] && path[folder_len] != '/')) return 0;
    return n < 8 || strcmp(path + n - 8, "lock.mdb");
}

static int watched(int fd, uint64_t *file, char *path, mode_t *mode) {
    char link[64];
    struct stat st;
    if (!folder_len || fd < 0 || fd == log_fd) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    if (!watched_path(path)) return 0;
    if (fstat(fd, &st)) return 0;
    *file = st.st_ino;
    *mode = st.st_mode;
    return 1;
}

/* Whether the next call on a watched file is to fail: -1 write half of it, or an error number. */
static int to_fail(int fd) {
    uint64_t file;
    mode_t mode;
    char path[PATH_MAX];
    if (fail_from < 0 || !watched(fd, &file, path, &mode)) return 0;
    long call = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    return call >= fail_from && call < fail_until ? fail_error : 0;
}

/* Calls from the from-th on, counted from now, fail with an error until the until-th; returns the calls so far. */
long powercut_fail(long from, long until, int error) {
    long before = calls;
    calls = 0;
    fail_until = until;
    fail_error = error;
    fail_from = from;
    return before;
}

#define FAIL_WRITE(n) \
    int refused = to_fail(fd); \
    if (refused > 0) { errno = refused; return -1; } \
    if (refused < 0) n = (n) > 1 ? (n) / 2 : (n)

#define FAIL_VECTOR \
    int refused = to_fail(fd); \
    if (refused > 0) { errno = refused; return -1; } \
    if (refused < 0) count = count > 1 ? count / 2 : count

static int synced_by_flag(int fd) { return !lies && (fcntl(fd, F_GETFL) & O_DSYNC) != 0; }

static void wrote(int fd, const struct iovec *parts, int count, off_t offset, ssize_t done, int dsync) {
    uint64_t file;
    mode_t mode;
    char path[PATH_MAX];
    int saved = errno;
    if (done > 0 && watched(fd, &file, path, &mode)) {
        put(WRITE, file, offset, parts, count, done);
        /* Such a write makes itself durable, not what was written before it. */
        if (dsync || synced_by_flag(fd)) put(SYNC_END, file, 1, NULL, 0, 0);
    }
    errno = saved;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    REAL(pwrite);
    FAIL_WRITE(n);
    ssize_t done = real(fd, data, n, at);
    struct iovec part = {(void *)data, n};
    wrote(fd, &part, 1, at, done, 0);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    REAL(pwrite64);
    FAIL_WRITE(n);
    ssize_t done = real(fd, data, n, at);
    struct iovec part = {(void *)data, n};
    wrote(fd, &part, 1, at, done, 0);
    return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    REAL(pwritev);
    FAIL_VECTOR;
    ssize_t done = real(fd, parts, count, at);
    wrote(fd, parts, count, at, done, 0);
    return done;
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL(pwritev64);
    FAIL_VECTOR;
    ssize_t done = real(fd, parts, count, at);
    wrote(fd, parts, count, at, done, 0);
    return done;
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    REAL(pwritev2);
    FAIL_VECTOR;
    ssize_t done = real(fd, parts, count, at, flags);
    if (done > 0 && at == -1) at = lseek(fd, 0, SEEK_CUR) - done;
    wrote(fd, parts, count, at, done, !lies && (flags & (RWF_DSYNC | RWF_SYNC)));
    return done;
}

#ifdef __GLIBC__
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    REAL(pwritev64v2);
    FAIL_VECTOR;
    ssize_t done = real(fd, parts, count, at, flags);
    if (done > 0 && at == -1) at = lseek(fd, 0, SEEK_CUR) - done;
    wrote(fd, parts, count, at, done, !lies && (flags & (RWF_DSYNC | RWF_SYNC)));
    return done;
}
#endif

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    FAIL_WRITE(n);
    ssize_t done = real(fd, data, n);
    struct iovec part = {(void *)data, n};
    if (log_fd >= 0 && done > 0) wrote(fd, &part, 1, lseek(fd, 0, SEEK_CUR) - done, done, 0);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    FAIL_VECTOR;
    ssize_t done = real(fd, parts, count);
    if (log_fd >= 0 && done > 0) wrote(fd, parts, count, lseek(fd, 0, SEEK_CUR) - done, done, 0);
    return done;
}

static int synced(int fd, int (*real)(int)) {
    uint64_t file;
    mode_t mode;
    char path[PATH_MAX];
    if (!watched(fd, &file, path, &mode)) return real(fd);
    int refused = to_fail(fd);
    if (refused > 0) { errno = refused; return -1; }
    if (lies) return 0;
    int is_folder = S_ISDIR(mode);
    if (is_folder) put_text(FOLDER_SYNC_BEGIN, file, path);
    else put(SYNC_BEGIN, file, 0, NULL, 0, 0);
    int failed = real(fd);
    if (failed) return failed;
    if (is_folder) put_text(FOLDER_SYNC_END, file, path);
    else put(SYNC_END, file, 0, NULL, 0, 0);
    return 0;
}

int fsync(int fd) { REAL(fsync); return synced(fd, real); }
int fdatasync(int fd) { REAL(fdatasync); return synced(fd, real); }

static void sized(int fd, uint64_t size, int only_grows) {
    uint64_t file;
    mode_t mode;
    char path[PATH_MAX];
    struct iovec part = {&only_grows, sizeof only_grows};
    if (watched(fd, &file, path, &mode)) put(SIZE, file, size, &part, 1, sizeof only_grows);
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    int refused = to_fail(fd);
    if (refused > 0) { errno = refused; return -1; }
    int failed = real(fd, size);
    if (!failed) sized(fd, size, 0);
    return failed;
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    int refused = to_fail(fd);
    if (refused > 0) { errno = refused; return -1; }
    int failed = real(fd, size);
    if (!failed) sized(fd, size, 0);
    return failed;
}

static void truncated(const char *path, uint64_t size) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) { sized(fd, size, 0); close(fd); }
}

int truncate(const char *path, off_t size) {
    REAL(truncate);
    int failed = real(path, size);
    if (!failed && log_fd >= 0) truncated(path, size);
    return failed;
}

int truncate64(const char *path, off64_t size) {
    REAL(truncate64);
    int failed = real(path, size);
    if (!failed && log_fd >= 0) truncated(path, size);
    return failed;
}

int posix_fallocate(int fd, off_t at, off_t n) {
    REAL(posix_fallocate);
    int refused = to_fail(fd);
    if (refused > 0) return refused;
    int failed = real(fd, at, n);
    if (!failed) sized(fd, at + n, 1);
    return failed;
}

int posix_fallocate64(int fd, off64_t at, off64_t n) {
    REAL(posix_fallocate64);
    int refused = to_fail(fd);
    if (refused > 0) return refused;
    int failed = real(fd, at, n);
    if (!failed) sized(fd, at + n, 1);
    return failed;
}

static void allocated(int fd, int mode, uint64_t at, uint64_t n) {
    uint64_t file;
    mode_t st_mode;
    char path[PATH_MAX];
    struct iovec part = {&n, sizeof n};
    if (!watched(fd, &file, path, &st_mode)) return;
    if (mode & ~(FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) put_text(UNSEEN, file, "fallocate");
    if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) put(ZERO, file, at, &part, 1, sizeof n);
    if (!(mode & FALLOC_FL_KEEP_SIZE)) sized(fd, at + n, 1);
}

int fallocate(int fd, int mode, off_t at, off_t n) {
    REAL(fallocate);
    int refused = to_fail(fd);
    if (refused > 0) { errno = refused; return -1; }
    int failed = real(fd, mode, at, n);
    if (!failed) allocated(fd, mode, at, n);
    return failed;
}

int fallocate64(int fd, int mode, off64_t at, off64_t n) {
    REAL(fallocate64);
    int refused = to_fail(fd);
    if (refused > 0) { errno = refused; return -1; }
    int failed = real(fd, mode, at, n);
    if (!failed) allocated(fd, mode, at, n);
    return failed;
}

static void absolute(int at_fd, const char *path, char *out) {
    char base[PATH_MAX], link[64];
    if (path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
    ssize_t n;
    if (at_fd == AT_FDCWD) n = getcwd(base, sizeof base) ? (ssize_t)strlen(base) : -1;
    else { snprintf(link, sizeof link, "/proc/self/fd/%d", at_fd); n = readlink(link, base, sizeof base - 1); }
    if (n < 0) { out[0] = 0; return; }
    base[n] = 0;
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
}

static void named(uint32_t kind, int at_fd, const char *path) {
    char full[PATH_MAX];
    struct stat st;
    if (log_fd < 0) return;
    int saved = errno;
    absolute(at_fd, path, full);
    if (watched_path(full)) put_text(kind, kind == CREATE && !stat(full, &st) ? st.st_ino : 0, full);
    errno = saved;
}

static void renamed(int from_fd, const char *from, int to_fd, const char *to) {
    char text[2 * PATH_MAX + 1], a[PATH_MAX], b[PATH_MAX];
    if (log_fd < 0) return;
    absolute(from_fd, from, a);
    absolute(to_fd, to, b);
    snprintf(text, sizeof text, "%s\n%s", a, b);
    if (watched_path(a) && watched_path(b)) put_text(RENAME, 0, text);
    else if (watched_path(a) || watched_path(b)) put_text(UNSEEN, 0, "rename out of or into the folder");
}

static int opened(int at_fd, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int fresh = 0, cut = 0;
    struct stat st;
    if (log_fd >= 0 && (flags & (O_CREAT | O_TRUNC)) && (flags & O_TMPFILE) != O_TMPFILE) {
        absolute(at_fd, path, full);
        int there = !stat(full, &st);
        fresh = (flags & O_CREAT) && !there;
        cut = (flags & O_TRUNC) && there;
    }
    int fd = (int)syscall(SYS_openat, at_fd, path, flags | O_LARGEFILE, mode);
    if (fd >= 0 && fresh) named(CREATE, at_fd, path);
    if (fd >= 0 && cut) sized(fd, 0, 0);
    return fd;
}

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list ap; va_start(ap, flags); mode = va_arg(ap, int); va_end(ap); }

int open(const char *path, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int fd, const char *path, int flags, ...) { MODE_OF(flags) return opened(fd, path, flags, mode); }
int openat64(int fd, const char *path, int flags, ...) { MODE_OF(flags) return opened(fd, path, flags, mode); }

int unlink(const char *path) {
    REAL(unlink);
    int failed = real(path);
    if (!failed) named(UNLINK, AT_FDCWD, path);
    return failed;
}

int unlinkat(int fd, const char *path, int flags) {
    REAL(unlinkat);
    int failed = real(fd, path, flags);
    if (!failed) named(UNLINK, fd, path);
    return failed;
}

int rmdir(const char *path) {
    REAL(rmdir);
    int failed = real(path);
    if (!failed) named(UNLINK, AT_FDCWD, path);
    return failed;
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    int failed = real(path, mode);
    if (!failed) named(MKDIR, AT_FDCWD, path);
    return failed;
}

int rename(const char *from, const char *to) {
    REAL(rename);
    int failed = real(from, to);
    if (!failed) renamed(AT_FDCWD, from, AT_FDCWD, to);
    return failed;
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    REAL(renameat);
    int failed = real(from_fd, from, to_fd, to);
    if (!failed) renamed(from_fd, from, to_fd, to);
    return failed;
}

static void unseen(int fd, const char *what) {
    uint64_t file;
    mode_t mode;
    char path[PATH_MAX];
    if (watched(fd, &file, path, &mode)) put_text(UNSEEN, file, what);
}

void *mmap(void *addr, size_t n, int prot, int flags, int fd, off_t at) {
    REAL(mmap);
    if (log_fd >= 0 && (prot & PROT_WRITE) && (flags & MAP_SHARED)) unseen(fd, "stores through a shared map");
    return real(addr, n, prot, flags, fd, at);
}

void *mmap64(void *addr, size_t n, int prot, int flags, int fd, off64_t at) {
    REAL(mmap64);
    if (log_fd >= 0 && (prot & PROT_WRITE) && (flags & MAP_SHARED)) unseen(fd, "stores through a shared map");
    return real(addr, n, prot, flags, fd, at);
}

ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags) {
    REAL(copy_file_range);
    unseen(to, "copy_file_range");
    return real(from, a, to, b, n, flags);
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t n) {
    REAL(sendfile64);
    unseen(to, "sendfile");
    return real(to, from, at, n);
}

/* Called by the process itself: the number stands in the log between its reads and writes. */
void powercut_mark(uint64_t value) {
    if (log_fd >= 0) put(MARK, 0, value, NULL, 0, 0);
}
