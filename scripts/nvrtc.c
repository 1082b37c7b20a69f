/* Compiles a CUDA program with NVRTC: nvrtc LIBRARY OUTPUT SOURCE HEADER... -- OPTION...
 *
 * The compiler's order of some things is that of addresses in memory, so what it writes is another from run to run where
 * these are chosen by chance. Here all its memory comes from one region that is always in the same place, in the order in
 * which it asks: the same sources give the same bytes. scripts/kernels builds and calls this.
 *
 * OUTPUT is machine code for an option -arch=sm_*, PTX otherwise. Exit status: 0 well, 1 it does not compile or something
 * cannot be read or written, 2 usage. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <unistd.h>

/* ---- memory at the same addresses in each run */

enum { ALIGNMENT = 16, SMALLEST = 64, CLASSES = 64 * 4, MOST_HEADERS = 64 };

#define REGION ((uintptr_t)0x100000000000)
/* Some ten times what the largest program needs. */
#define REGION_BYTES ((size_t)8 << 30)

/* In front of what was asked for. */
struct block {
    size_t bytes;
    size_t class;
};

/* In what was given back. */
struct free_block {
    struct free_block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t unused;
static struct free_block *given_back[CLASSES];

/* Without memory. */
static void die(const char *why) {
    ssize_t told = write(STDERR_FILENO, why, strlen(why));
    (void)told;
    _exit(1);
}

/* Four classes for each power of two. */
static size_t class_of(size_t bytes, size_t *rounded) {
    int bits = 63 - __builtin_clzl(bytes);
    size_t quarter = (size_t)1 << (bits - 2);
    *rounded = (bytes + quarter - 1) & ~(quarter - 1);
    bits = 63 - __builtin_clzl(*rounded);
    return (size_t)bits * 4 + ((*rounded >> (bits - 2)) & 3);
}

static struct block *block_of(void *memory) { return (struct block *)memory - 1; }

static void *take(size_t bytes, size_t alignment) {
    if (bytes > REGION_BYTES / 2) return NULL;
    size_t rounded, class = class_of(bytes < SMALLEST ? SMALLEST : bytes, &rounded);
    pthread_mutex_lock(&lock);
    if (unused == 0) {
        int protection = PROT_READ | PROT_WRITE;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        if (mmap((void *)REGION, REGION_BYTES, protection, flags, -1, 0) != (void *)REGION) {
            die("nvrtc: cannot map the memory at its addresses\n");
        }
        unused = REGION;
    }
    void *memory = given_back[class];
    if (memory != NULL && alignment <= ALIGNMENT) {
        given_back[class] = given_back[class]->next;
    } else {
        if (alignment < ALIGNMENT) alignment = ALIGNMENT;
        uintptr_t at = (unused + sizeof(struct block) + alignment - 1) & ~(uintptr_t)(alignment - 1);
        if (at + rounded > REGION + REGION_BYTES) die("nvrtc: out of memory\n");
        unused = at + rounded;
        memory = (void *)at;
        *block_of(memory) = (struct block){rounded, class};
    }
    pthread_mutex_unlock(&lock);
    return memory;
}

void *malloc(size_t bytes) { return take(bytes, ALIGNMENT); }

void free(void *memory) {
    if (memory == NULL) return;
    struct free_block *block = memory;
    size_t class = block_of(memory)->class;
    pthread_mutex_lock(&lock);
    block->next = given_back[class];
    given_back[class] = block;
    pthread_mutex_unlock(&lock);
}

void *calloc(size_t count, size_t each) {
    size_t bytes;
    if (__builtin_mul_overflow(count, each, &bytes)) return NULL;
    void *memory = take(bytes, ALIGNMENT);
    return memory == NULL ? NULL : memset(memory, 0, bytes);
}

void *realloc(void *memory, size_t bytes) {
    if (memory == NULL) return take(bytes, ALIGNMENT);
    size_t had = block_of(memory)->bytes;
    if (bytes <= had) return memory;
    void *more = take(bytes, ALIGNMENT);
    if (more != NULL) {
        memcpy(more, memory, had);
        free(memory);
    }
    return more;
}

void *aligned_alloc(size_t alignment, size_t bytes) { return take(bytes, alignment); }

void *memalign(size_t alignment, size_t bytes) { return take(bytes, alignment); }

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    *memory = take(bytes, alignment);
    return *memory == NULL ? 12 /* ENOMEM */ : 0;
}

size_t malloc_usable_size(void *memory) { return memory == NULL ? 0 : block_of(memory)->bytes; }

/* ---- the compiler */

typedef void *program_t;

static void *library;

static void *find(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "nvrtc: %s\n", dlerror());
        exit(1);
    }
    return found;
}

static void check(const char *what, int status) {
    if (status == 0) return;
    const char *(*describe)(int) = find("nvrtcGetErrorString");
    fprintf(stderr, "nvrtc: %s: %s\n", what, describe(status));
    exit(1);
}

static const char *name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* The text of a file. */
static char *text_of(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        exit(1);
    }
    long bytes = ftell(file);
    rewind(file);
    char *text = bytes < 0 ? NULL : calloc((size_t)bytes + 1, 1);
    if (text == NULL || fread(text, 1, (size_t)bytes, file) != (size_t)bytes) {
        perror(path);
        exit(1);
    }
    fclose(file);
    return text;
}

/* What the compiler has made: the log, PTX or machine code. */
static char *output(program_t program, const char *size_name, const char *name, size_t *bytes) {
    int (*size)(program_t, size_t *) = find(size_name);
    int (*get)(program_t, char *) = find(name);
    check(size_name, size(program, bytes));
    char *text = calloc(*bytes + 1, 1);
    if (text == NULL) die("nvrtc: out of memory\n");
    check(name, get(program, text));
    return text;
}

int main(int count, char **arguments) {
    /* Addresses of what is no heap, too, where that is allowed. */
    int kind = personality(0xffffffff);
    if (kind != -1 && !(kind & ADDR_NO_RANDOMIZE) && personality((unsigned)kind | ADDR_NO_RANDOMIZE) != -1) {
        execv("/proc/self/exe", arguments);
    }
    int end = 4;
    while (end < count && strcmp(arguments[end], "--") != 0) end++;
    int headers = end - 4;
    if (end >= count || headers > MOST_HEADERS) {
        fprintf(stderr, "usage: %s LIBRARY OUTPUT SOURCE HEADER... -- OPTION...\n", arguments[0]);
        return 2;
    }
    library = dlopen(arguments[1], RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "nvrtc: %s\n", dlerror());
        return 1;
    }
    const char *texts[MOST_HEADERS], *names[MOST_HEADERS];
    for (int i = 0; i < headers; i++) {
        texts[i] = text_of(arguments[4 + i]);
        names[i] = name_of(arguments[4 + i]);
    }
    const char **options = (const char **)arguments + end + 1;
    int option_count = count - end - 1;
    bool machine_code = false;
    for (int i = 0; i < option_count; i++) machine_code |= strncmp(options[i], "-arch=sm_", 9) == 0;

    int (*create)(program_t *, const char *, const char *, int, const char **, const char **) =
        find("nvrtcCreateProgram");
    int (*compile)(program_t, int, const char **) = find("nvrtcCompileProgram");
    program_t program;
    check("nvrtcCreateProgram",
          create(&program, text_of(arguments[3]), name_of(arguments[3]), headers, texts, names));
    int status = compile(program, option_count, options);
    size_t bytes;
    fputs(output(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", &bytes), stderr);
    check(arguments[3], status);
    char *code = machine_code ? output(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN", &bytes)
                              : output(program, "nvrtcGetPTXSize", "nvrtcGetPTX", &bytes);
    FILE *file = fopen(arguments[2], "wb");
    if (file == NULL || fwrite(code, 1, bytes, file) != bytes || fclose(file) != 0) {
        perror(arguments[2]);
        return 1;
    }
    return 0;
}
