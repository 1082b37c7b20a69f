/* Compiles a CUDA program with NVRTC: nvrtc LIBRARY OUTPUT SOURCE HEADER... -- OPTION...
 *
 * The compiler's order of some things is that of addresses in memory, so what it writes is another where these are others:
 * from run to run, and with the length of a path. Here its code, its stack and what it allocates are always in the same
 * place, and nobody else's allocations come between: the same sources give the same bytes. scripts/kernels builds and calls
 * this.
 *
 * OUTPUT is machine code for an option -arch=sm_*, PTX otherwise. Exit status: 0 well, 1 it does not compile or something
 * cannot be read or written, 2 usage. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- memory at the same addresses in each run */

enum { ALIGNMENT = 16, SMALLEST = 64, LISTS = 64 * 4, MOST_OBJECTS = 16 };

/* In front of what was asked for. */
struct block {
    size_t bytes;
    struct region *region;
};

/* In what was given back. */
struct free_block {
    struct free_block *next;
};

struct region {
    uintptr_t unused;
    /* Up to where there is memory: a system may count what is writable, used or not. */
    uintptr_t writable;
    uintptr_t end;
    /* Four lists for each power of two. */
    struct free_block *given_back[LISTS];
};

/* Some ten times what the largest program needs. */
#define REGION_BYTES ((size_t)8 << 30)
#define STEP_BYTES ((size_t)64 << 20)
#define REGION(start) {(uintptr_t)(start), (uintptr_t)(start), (uintptr_t)(start) + REGION_BYTES, {NULL}}
static struct region compilers = REGION(0x100000000000);
static struct region others = REGION(0x200000000000);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool mapped;

/* Where the code lies that is not the compiler's: this program, the C library, the loader. */
static struct { uintptr_t start, end; } objects[MOST_OBJECTS];
static int object_count;

/* Without memory. */
static void die(const char *why) {
    ssize_t told = write(STDERR_FILENO, why, strlen(why));
    (void)told;
    _exit(1);
}

static int note_object(struct dl_phdr_info *object, size_t size, void *nothing) {
    (void)size;
    (void)nothing;
    uintptr_t start = UINTPTR_MAX, end = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD) continue;
        uintptr_t at = object->dlpi_addr + part->p_vaddr;
        if (at < start) start = at;
        if (at + part->p_memsz > end) end = at + part->p_memsz;
    }
    if (object_count == MOST_OBJECTS) die("nvrtc: too many libraries\n");
    objects[object_count].start = start;
    objects[object_count++].end = end;
    return 0;
}

/* Until `objects` are known nobody is the compiler. */
static struct region *region_of(const void *caller) {
    if (object_count == 0) return &others;
    for (int i = 0; i < object_count; i++) {
        if (objects[i].start <= (uintptr_t)caller && (uintptr_t)caller < objects[i].end) return &others;
    }
    return &compilers;
}

static void *map(uintptr_t start, size_t bytes, int protection) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *at = mmap((void *)start, bytes, protection, flags, -1, 0);
    if (at == MAP_FAILED && errno == ENOMEM) {
        die("nvrtc: cannot map memory at its addresses: a limit is too low (ulimit -v, ulimit -d or vm.overcommit_memory)\n");
    }
    if (at != (void *)start) die("nvrtc: cannot map memory at its addresses: something else is there\n");
    return at;
}

/* Gives a region memory up to an address, and some more. */
static void extend(struct region *region, uintptr_t end) {
    size_t bytes = (end - region->writable + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES;
    if (mprotect((void *)region->writable, bytes, PROT_READ | PROT_WRITE) != 0) die("nvrtc: out of memory\n");
    region->writable += bytes;
}

/* The list for so many bytes, which are rounded up to what its blocks have. */
static size_t list_of(size_t *bytes) {
    if (*bytes < SMALLEST) *bytes = SMALLEST;
    int bits = 63 - __builtin_clzl(*bytes);
    size_t quarter = (size_t)1 << (bits - 2);
    *bytes = (*bytes + quarter - 1) & ~(quarter - 1);
    bits = 63 - __builtin_clzl(*bytes);
    return (size_t)bits * 4 + ((*bytes >> (bits - 2)) & 3);
}

static struct block *block_of(void *memory) { return (struct block *)memory - 1; }

static void *take(size_t bytes, size_t alignment, const void *caller) {
    struct region *region = region_of(caller);
    if (bytes > REGION_BYTES / 2) return NULL;
    size_t list = list_of(&bytes);
    pthread_mutex_lock(&lock);
    if (!mapped) {
        map(compilers.unused, REGION_BYTES, PROT_NONE);
        map(others.unused, REGION_BYTES, PROT_NONE);
        mapped = true;
    }
    void *memory = region->given_back[list];
    if (memory != NULL && alignment <= ALIGNMENT) {
        region->given_back[list] = region->given_back[list]->next;
    } else {
        if (alignment < ALIGNMENT) alignment = ALIGNMENT;
        uintptr_t at = (region->unused + sizeof(struct block) + alignment - 1) & ~(uintptr_t)(alignment - 1);
        if (at + bytes > region->end) die("nvrtc: out of memory\n");
        if (at + bytes > region->writable) extend(region, at + bytes);
        region->unused = at + bytes;
        memory = (void *)at;
        *block_of(memory) = (struct block){bytes, region};
    }
    pthread_mutex_unlock(&lock);
    return memory;
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t bytes) { return take(bytes, ALIGNMENT, CALLER); }

void free(void *memory) {
    if (memory == NULL) return;
    struct free_block *block = memory;
    struct region *region = block_of(memory)->region;
    size_t bytes = block_of(memory)->bytes;
    size_t list = list_of(&bytes);
    pthread_mutex_lock(&lock);
    block->next = region->given_back[list];
    region->given_back[list] = block;
    pthread_mutex_unlock(&lock);
}

void *calloc(size_t count, size_t each) {
    size_t bytes;
    if (__builtin_mul_overflow(count, each, &bytes)) return NULL;
    void *memory = take(bytes, ALIGNMENT, CALLER);
    return memory == NULL ? NULL : memset(memory, 0, bytes);
}

void *realloc(void *memory, size_t bytes) {
    if (memory == NULL) return take(bytes, ALIGNMENT, CALLER);
    size_t had = block_of(memory)->bytes;
    if (bytes <= had) return memory;
    void *more = take(bytes, ALIGNMENT, CALLER);
    if (more != NULL) {
        memcpy(more, memory, had);
        free(memory);
    }
    return more;
}

void *aligned_alloc(size_t alignment, size_t bytes) { return take(bytes, alignment, CALLER); }

void *memalign(size_t alignment, size_t bytes) { return take(bytes, alignment, CALLER); }

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    *memory = take(bytes, alignment, CALLER);
    return *memory == NULL ? 12 /* ENOMEM */ : 0;
}

size_t malloc_usable_size(void *memory) { return memory == NULL ? 0 : block_of(memory)->bytes; }

/* ---- the compiler */

enum { MOST_HEADERS = 64 };

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

/* ---- code and stack at the same addresses in each run */

enum { MOST_WALLS = 256 };

#define CODE ((uintptr_t)0x300000000000)
#define STACK ((uintptr_t)0x400000000000)
#define STACK_BYTES ((size_t)256 << 20)
/* Below it the kernel chooses addresses. */
#define TOP ((uintptr_t)0x7ffffffff000)
#define PAGE ((uintptr_t)4096)

struct wall {
    void *at;
    size_t bytes;
};

/* The address space that a library takes when it is loaded. */
static size_t span_of(const char *path) {
    ElfW(Ehdr) header;
    ElfW(Phdr) part;
    uintptr_t end = 0;
    int file = open(path, O_RDONLY);
    bool read_well = file >= 0 && pread(file, &header, sizeof header, 0) == sizeof header;
    for (int i = 0; read_well && i < header.e_phnum; i++) {
        off_t at = (off_t)(header.e_phoff + (size_t)i * sizeof part);
        read_well = pread(file, &part, sizeof part, at) == sizeof part;
        if (read_well && part.p_type == PT_LOAD) end = part.p_vaddr + part.p_memsz;
    }
    if (!read_well || end == 0) {
        fprintf(stderr, "nvrtc: %s: %s\n", path, file < 0 ? strerror(errno) : "no library");
        exit(1);
    }
    close(file);
    return (end + PAGE - 1) & ~(PAGE - 1);
}

static void build_wall(struct wall *walls, int *count, uintptr_t start, uintptr_t end) {
    if (start >= end) return;
    if (*count == MOST_WALLS) die("nvrtc: too many mappings\n");
    walls[(*count)++] = (struct wall){map(start, end - start, PROT_NONE), end - start};
}

/* Loads the library where nothing else is free: addresses are the kernel's choice. */
static void *load(const char *path) {
    struct wall walls[MOST_WALLS];
    int count = 0;
    uintptr_t code_end = CODE + span_of(path), free_from = (uintptr_t)1 << 20;
    FILE *maps = fopen("/proc/self/maps", "r");
    if (maps == NULL) die("nvrtc: cannot read /proc/self/maps\n");
    char line[PATH_MAX + 256];
    while (free_from < TOP) {
        uintptr_t start = TOP, end = TOP;
        if (fgets(line, sizeof line, maps) != NULL && sscanf(line, "%lx-%lx", &start, &end) != 2) continue;
        if (start > TOP) start = TOP;
        /* The stack of the first thread may grow. */
        if (strstr(line, "[stack]") != NULL && start < TOP) start -= (uintptr_t)16 << 20;
        if (free_from < code_end && CODE < start) {
            build_wall(walls, &count, free_from, CODE);
            free_from = code_end;
        }
        build_wall(walls, &count, free_from, start);
        if (free_from < end) free_from = end;
    }
    fclose(maps);
    void *loaded = dlopen(path, RTLD_NOW);
    if (loaded == NULL) {
        fprintf(stderr, "nvrtc: %s\n", dlerror());
        exit(1);
    }
    for (int i = 0; i < count; i++) munmap(walls[i].at, walls[i].bytes);
    struct link_map *map;
    if (dlinfo(loaded, RTLD_DI_LINKMAP, &map) != 0 || map->l_addr != CODE) die("nvrtc: the library is not at its address\n");
    return loaded;
}

struct arguments {
    int count;
    char **values;
};

/* What the program does: `struct arguments`. */
static void *compile(void *passed) {
    const struct arguments *given = passed;
    char **arguments = given->values;
    int count = given->count, end = 4;
    while (end < count && strcmp(arguments[end], "--") != 0) end++;
    int headers = end - 4;
    if (end >= count || headers > MOST_HEADERS) {
        fprintf(stderr, "usage: %s LIBRARY OUTPUT SOURCE HEADER... -- OPTION...\n", arguments[0]);
        exit(2);
    }
    dl_iterate_phdr(note_object, NULL);
    library = load(arguments[1]);
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
    int (*compile_program)(program_t, int, const char **) = find("nvrtcCompileProgram");
    program_t program;
    check("nvrtcCreateProgram",
          create(&program, text_of(arguments[3]), name_of(arguments[3]), headers, texts, names));
    int status = compile_program(program, option_count, options);
    size_t bytes;
    fputs(output(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", &bytes), stderr);
    check(arguments[3], status);
    char *code = machine_code ? output(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN", &bytes)
                              : output(program, "nvrtcGetPTXSize", "nvrtcGetPTX", &bytes);
    FILE *file = fopen(arguments[2], "wb");
    if (file == NULL || fwrite(code, 1, bytes, file) != bytes || fclose(file) != 0) {
        perror(arguments[2]);
        exit(1);
    }
    return NULL;
}

int main(int count, char **values) {
    void *stack = map(STACK, STACK_BYTES, PROT_READ | PROT_WRITE);
    pthread_attr_t attributes;
    pthread_t thread;
    struct arguments arguments = {count, values};
    if (pthread_attr_init(&attributes) != 0 || pthread_attr_setstack(&attributes, stack, STACK_BYTES) != 0 ||
        pthread_create(&thread, &attributes, compile, &arguments) != 0 || pthread_join(thread, NULL) != 0) {
        die("nvrtc: cannot start a thread\n");
    }
    return 0;
}
