/* Preloaded into the processes of a deployment: a wall clock that was set, and a disk that is slow.

   The file that CHAOS_TOLD names holds two numbers, which a test changes while they run: the seconds that
   the wall clock is ahead, and the seconds that each write takes which waits for the disk. Programs that ask
   the kernel past the C library (etcd, nats-server) see neither. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct told {
    volatile double ahead_s;
    volatile double write_s;
};

static const struct told *told;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CHAOS_TOLD");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0)
        return;
    void *place = mmap(NULL, sizeof *told, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (place != MAP_FAILED)
        told = place;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = real_clock_gettime ? real_clock_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME && told)
        now->tv_sec += (time_t)told->ahead_s;
    return failed;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

static void wait_for_the_disk(void)
{
    double seconds = told ? told->write_s : 0;
    struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    int before = errno;
    while (seconds > 0 && nanosleep(&left, &left) && errno == EINTR)
        ;
    errno = before;
}

int fsync(int file)
{
    wait_for_the_disk();
    return (int)syscall(SYS_fsync, file);
}

int fdatasync(int file)
{
    wait_for_the_disk();
    return (int)syscall(SYS_fdatasync, file);
}

int rename(const char *from, const char *to)
{
    wait_for_the_disk();
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
