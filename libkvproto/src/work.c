/* One call at work: its memory, the place that it jumps to when something is refused, and the error that it leaves. A handle keeps the memory of the call that has made it. */

typedef struct Block { struct Block *next; size_t size, used; max_align_t bytes[]; } Block;
typedef struct { kvp_options options; Block *blocks; size_t held; } Arena;
typedef struct {
    Arena arena;
    jmp_buf refused;
    kvp_error *error, unread; /* unread: where the caller wants none */
    const uint8_t *data; /* what is read, from `at` to `end` */
    size_t at, end;
    uint64_t values; /* entries of maps and elements of lists that are left to this body */
} Work;
typedef void Job(Work *w, void *arguments);
typedef struct { char *text; size_t size, room; } Text; /* or a list whose elements lie one after the other */
typedef struct Path { const struct Path *up; const char *name; size_t index; } Path; /* put together only when something is refused */
enum { SMALL_BLOCK = 2048, LARGE_BLOCK = 1 << 20 };
static const size_t DEFAULT_MEMORY = (size_t)1 << 30;

static void *by_malloc(void *state, size_t size) {
    (void)state;
    return malloc(size);
}
static void by_free(void *state, void *block) {
    (void)state;
    free(block);
}
static kvp_options options_of(const kvp_options *stated) {
    kvp_options options = {.size = sizeof options};
    if (stated) memcpy(&options, stated, stated->size < sizeof options ? stated->size : sizeof options);
    if (!options.allocate || !options.release) options.allocate = by_malloc, options.release = by_free;
    if (!options.max_memory) options.max_memory = DEFAULT_MEMORY;
    return options;
}
static void release(Arena *arena) {
    kvp_options options = arena->options;
    for (Block *block = arena->blocks, *next; block; block = next) { /* the arena may lie in one of them */
        next = block->next;
        options.release(options.state, block);
    }
}
static Block *new_block(Arena *arena, size_t size) { /* NULL if there is no memory */
    size_t room = arena->held < SMALL_BLOCK ? SMALL_BLOCK : arena->held < LARGE_BLOCK ? arena->held : LARGE_BLOCK;
    if (room < size) room = size;
    if (room > arena->options.max_memory || arena->held > arena->options.max_memory - room) room = size; /* as much as is asked for, if no more may be held */
    if (room > arena->options.max_memory || arena->held > arena->options.max_memory - room || room > SIZE_MAX - sizeof(Block)) return NULL;
    Block *block = arena->options.allocate(arena->options.state, sizeof *block + room);
    if (!block) return NULL;
    *block = (Block){arena->blocks, room, 0};
    arena->held += room;
    return arena->blocks = block;
}
static void *take_memory(Arena *arena, size_t size) { /* uninitialized; NULL if there is none */
    const size_t step = sizeof(max_align_t);
    if (size > SIZE_MAX - step) return NULL;
    size = size ? (size + step - 1) / step * step : step;
    Block *block = arena->blocks;
    if (!block || block->size - block->used < size) block = new_block(arena, size);
    if (!block) return NULL;
    void *found = (char *)block->bytes + block->used;
    block->used += size;
    return found;
}

/* ---- refusals ---- */

static void put_words(char *into, size_t room, const char *words, size_t size) { /* with a NUL, and cut between two characters */
    if (size >= room)
        for (size = room - 1; size && ((unsigned char)words[size] & 0xc0) == 0x80;) size--;
    if (size) memcpy(into, words, size);
    into[size] = 0;
}
static void walk(const Path *path, kvp_error *error) {
    if (!path) return;
    walk(path->up, error);
    char number[32];
    if (!path->name) snprintf(number, sizeof number, "[%zu]", path->index);
    size_t used = strlen(error->path);
    if (path->name && used && used + 1 < sizeof error->path) {
        memcpy(error->path + used, ".", 2);
        used++;
    }
    const char *words = path->name ? path->name : number;
    put_words(error->path + used, sizeof error->path - used, words, strlen(words));
}
static _Noreturn void refuse(Work *w, int code, const Path *path) {
    w->error->code = code;
    w->error->path[0] = 0;
    walk(path, w->error);
    longjmp(w->refused, 1);
}
static void clear(kvp_error *error) {
    error->code = 0;
    error->path[0] = error->mine[0] = error->yours[0] = 0;
}
/* Does a job, and keeps what it has made; or gives all of it back, and returns what was refused. */
static int attempt(Work *w, const kvp_options *options, kvp_error *error, Job *job, void *arguments) {
    w->arena = (Arena){.options = options_of(options)};
    w->error = error ? error : &w->unread;
    clear(w->error);
    if (setjmp(w->refused)) {
        release(&w->arena);
        return w->error->code;
    }
    job(w, arguments);
    return KVP_OK;
}

/* ---- memory of a call ---- */

static void *room_for(Work *w, size_t count, size_t size) {
    void *found = size && count > SIZE_MAX / size ? NULL : take_memory(&w->arena, count * size);
    if (!found) refuse(w, KVP_NO_MEMORY, NULL);
    return found;
}
static void *get(Work *w, size_t count, size_t size) { /* zeroed */
    return memset(room_for(w, count, size), 0, count * size);
}
static void add(Work *w, Text *text, const void *bytes, size_t size) {
    if (size > text->room - text->size) {
        size_t room = 2 * (text->size + size) + 64;
        char *longer = room_for(w, room, 1);
        if (text->size) memcpy(longer, text->text, text->size);
        text->text = longer;
        text->room = room;
    }
    if (size) memcpy(text->text + text->size, bytes, size);
    text->size += size;
}

/* ---- order ---- */

typedef int Compare(const void *a, const void *b, const void *context);
static void merge(const char **from, size_t middle, size_t count, const char **into, Compare *compare, const void *context) {
    size_t a = 0, b = middle;
    for (size_t i = 0; i < count; i++) into[i] = b == count || (a < middle && compare(from[a], from[b], context) <= 0) ? from[a++] : from[b++];
}
/* Stable, without the qsort of a C library, which may call malloc and has no context. */
static void sort(Work *w, void *base, size_t count, size_t size, Compare *compare, const void *context) {
    char *bytes = base;
    size_t ordered = 1;
    while (ordered < count && compare(bytes + (ordered - 1) * size, bytes + ordered * size, context) <= 0) ordered++;
    if (ordered >= count) return;
    const char **places = room_for(w, count, sizeof *places), **other = room_for(w, count, sizeof *other);
    for (size_t i = 0; i < count; i++) places[i] = bytes + i * size;
    for (size_t run = 1; run < count; run *= 2) {
        for (size_t i = 0; i < count; i += 2 * run) {
            size_t both = count - i < 2 * run ? count - i : 2 * run;
            merge(places + i, both < run ? both : run, both, other + i, compare, context);
        }
        const char **swapped = places;
        places = other;
        other = swapped;
    }
    char *sorted = room_for(w, count, size);
    for (size_t i = 0; i < count; i++) memcpy(sorted + i * size, places[i], size);
    memcpy(bytes, sorted, count * size);
}
static int by_number(const void *a, const void *b, const void *context) {
    const uint64_t *x = a, *y = b;
    (void)context;
    return (*x > *y) - (*x < *y);
}
