/* The memory of a small engine in C, and how its attention reads it. What kvproto is told of it follows from the same table; the reading does not. Included by peer.c. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>
#include "engine.c"

/* ---- worlds: what caches the suite asks an engine to have (testee.md, live engines) ---- */

typedef struct { const char *name, *dtype; int lanes, bytes; } PoolPart;
typedef struct { const char *world, *name, *kind; int model, layer, layers, rows, live; PoolPart parts[2]; } Cache; /* layers from one on */
static const Cache CACHES[] = {
    {"gqa", "kv", "PAGE", 0, 0, 2, 16, 0, {{"k", "U8", 2, 32}, {"v", "U8", 2, 32}}},
    {"gqa", "first", "HANDOFF", 0, 0, 1, 1, 0, {{"token", "I32", 1, 4}}},
    {"mla", "target", "PAGE", 0, 0, 3, 8, 0, {{"latent", "U8", 1, 48}}},
    {"mla", "draft", "PAGE", 1, 0, 1, 16, 0, {{"k", "U8", 4, 8}, {"v", "U8", 4, 8}}},
    {"mla", "first", "HANDOFF", 0, 0, 1, 1, 0, {{"token", "I32", 1, 4}, {"hidden", "U8", 1, 24}}},
    {"long", "kv", "PAGE", 0, 0, 1, 16, 0, {{"k", "U8", 4, 64}, {"v", "U8", 4, 64}}},
    {"long", "first", "HANDOFF", 0, 0, 1, 1, 0, {{"token", "I32", 1, 4}}},
    {"hybrid", "full", "PAGE", 0, 0, 1, 8, 0, {{"k", "U8", 2, 16}, {"v", "U8", 2, 16}}},
    {"hybrid", "window", "RING", 0, 1, 1, 8, 0, {{"k", "U8", 2, 16}, {"v", "U8", 2, 16}}},
    {"hybrid", "state", "SLOT", 0, 2, 1, 3, 2, {{"ssm", "U8", 4, 32}}},
};
#ifndef POOL_ITEMS
#define POOL_ITEMS 64
#endif
enum { ITEMS = POOL_ITEMS, GROUPS = 3 };
static struct {
    const Cache *caches; /* groups have the ids 0, 1, 2 in this order */
    int count, fd;
    bool shared;
    char nonce[33];
    size_t size;
    uint8_t *bytes;
    size_t begins[GROUPS]; /* of each group in the memory */
    bool used[GROUPS][ITEMS];
} pool = {.fd = -1};

static bool has_memory(const Cache *cache) { return strcmp(cache->kind, "HANDOFF") != 0; }
static int parts_of(const Cache *cache) { return cache->parts[1].name ? 2 : 1; }
static size_t part_size(const Cache *cache, int part) { return (size_t)ITEMS * (size_t)(cache->rows * cache->parts[part].lanes * cache->parts[part].bytes); }
static size_t layer_size(const Cache *cache) {
    size_t size = 0;
    for (int p = 0; p < parts_of(cache); p++) size += part_size(cache, p);
    return size;
}
static void random_bytes(void *bytes, size_t size) {
    if (getrandom(bytes, size, 0) != (ssize_t)size) abort();
}
static bool open_pool(const char *world, bool shared) { /* a sealed memfd, where others are to map it */
    for (size_t i = 0; i < sizeof CACHES / sizeof *CACHES; i++)
        if (!strcmp(CACHES[i].world, world)) {
            if (!pool.count) pool.caches = &CACHES[i];
            pool.count++;
        }
    for (int g = 0; g < pool.count; g++) {
        pool.begins[g] = pool.size;
        if (has_memory(&pool.caches[g])) pool.size += (size_t)pool.caches[g].layers * layer_size(&pool.caches[g]);
    }
    if (!pool.count) return false;
    pool.shared = shared;
    uint8_t raw[16];
    random_bytes(raw, sizeof raw);
    for (int i = 0; i < 16; i++) snprintf(pool.nonce + 2 * i, 3, "%02x", raw[i]);
    char name[64];
    snprintf(name, sizeof name, "kvproto-%s", pool.nonce);
    pool.fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (pool.fd < 0 || ftruncate(pool.fd, (off_t)pool.size) || fcntl(pool.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) return false;
    pool.bytes = mmap(NULL, pool.size, PROT_READ | PROT_WRITE, MAP_SHARED, pool.fd, 0);
    return pool.bytes != MAP_FAILED;
}

static void *pool_place(void *state, uint64_t region, uint64_t offset, uint64_t size) {
    (void)state;
    return !region && offset <= pool.size && size <= pool.size - offset ? pool.bytes + offset : NULL;
}

/* ---- attention: a row of a head, by item and row; heads come first in an item ---- */

static uint8_t *head_row(int group, int layer, int part, unsigned item, int row, int head) {
    const Cache *cache = &pool.caches[group];
    uint8_t *found = pool.bytes + pool.begins[group] + (size_t)(layer - cache->layer) * layer_size(cache);
    for (int p = 0; p < part; p++) found += part_size(cache, p);
    const PoolPart *of = &cache->parts[part];
    return found + ((size_t)item * (size_t)of->lanes + (size_t)head) * (size_t)(cache->rows * of->bytes) + (size_t)row * (size_t)of->bytes;
}
/* ---- what kvproto is told: Geometry and columns, in JSON form ---- */

static void form_geometry(Text *text) {
    form(text, "{\"replica\": \"0\", \"facts\": [], \"groups\": [");
    for (int g = 0; g < pool.count; g++) {
        const Cache *c = &pool.caches[g];
        form(text, "%s{\"id\": \"%d\", \"name\": \"%s\", \"model\": \"%d\", \"kind\": \"%s\", \"rows\": \"%d\", \"tokens_per_row\": \"1\", ", g ? ", " : "", g, c->name, c->model, c->kind, c->rows);
        if (c->live) form(text, "\"live_rows\": \"%d\", ", c->live);
        form(text, "\"cp_size\": \"1\", \"interleave\": \"1\", \"origin\": \"0\", \"parts\": [");
        for (int p = 0; p < parts_of(c); p++)
            form(text, "%s{\"name\": \"%s\", \"dtype\": \"%s\", \"lanes\": \"%d\", \"lane_bytes\": \"%d\"}", p ? ", " : "", c->parts[p].name, c->parts[p].dtype, c->parts[p].lanes, c->parts[p].bytes);
        form(text, "]}");
    }
    form(text, "], \"ranks\": [{\"rank\": \"0\", \"owns\": [");
    for (int g = 0; g < pool.count; g++) {
        const Cache *c = &pool.caches[g];
        form(text, "%s{\"group\": \"%d\", \"cp_rank\": \"0\", \"layers\": [", g ? ", " : "", g);
        for (int n = 0; n < c->layers; n++) form(text, "%s\"%d\"", n ? ", " : "", c->layer + n);
        form(text, "], \"lanes\": [");
        for (int p = 0; p < parts_of(c); p++) form(text, "%s{\"part\": \"%d\", \"lo\": \"0\", \"hi\": \"%d\"}", p ? ", " : "", p, c->parts[p].lanes);
        form(text, "]}");
    }
    form(text, "]}]}");
}
static void form_columns(Text *text) { /* one region, in which items lie as [item, head, row, byte] of each layer and part */
    static const char *const names[] = {"region", "offset", "item_stride", "row_stride", "lane_stride"};
    form(text, "[");
    bool more = false;
    for (int g = 0; g < pool.count; g++) {
        const Cache *c = &pool.caches[g];
        if (!has_memory(c)) continue;
        form(text, "%s{\"group\": \"%d\", \"items\": \"%d\"", more ? ", " : "", g, ITEMS);
        more = true;
        for (int k = 0; k < 5; k++) {
            size_t offset = pool.begins[g];
            form(text, ", \"%s\": [", names[k]);
            for (int n = 0; n < c->layers; n++)
                for (int p = 0; p < parts_of(c); p++) {
                    size_t row = (size_t)c->parts[p].bytes, lane = row * (size_t)c->rows, item = lane * (size_t)c->parts[p].lanes;
                    form(text, "%s\"%zu\"", n || p ? ", " : "", ((size_t[]){0, offset, item, row, lane})[k]);
                    offset += part_size(c, p);
                }
            form(text, "]");
        }
        form(text, "}");
    }
    form(text, "]");
}

