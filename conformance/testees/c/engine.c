/* What a small engine has between itself and libkvproto: the memory of a turn, refusals, and what it reads of a Description. Included by pool.c. */
#define LIVE
#include "testee.c"
#include <setjmp.h>

enum { HEADER = 16, PAGE = KVP_ITEM_KIND_PAGE, SLOT = KVP_ITEM_KIND_SLOT, RING = KVP_ITEM_KIND_RING, HANDOFF = KVP_ITEM_KIND_HANDOFF };
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- memory: everything of one turn is given back at once, also what the library has made in it ---- */

typedef struct Block { struct Block *next; max_align_t bytes[]; } Block;
static Block *blocks;
static void *get(size_t size) {
    Block *block = calloc(1, sizeof *block + size);
    if (!block) abort();
    block->next = blocks;
    blocks = block;
    return block->bytes;
}
static void give_back(void) {
    for (Block *next; blocks; blocks = next) {
        next = blocks->next;
        free(blocks);
    }
}
static void *allocate(void *state, size_t size) {
    (void)state;
    return get(size);
}
static void release_block(void *state, void *bytes) { /* before its turn is over */
    (void)state;
    for (Block **each = &blocks; *each; each = &(*each)->next)
        if ((*each)->bytes == bytes) {
            Block *block = *each;
            *each = block->next;
            free(block);
            return;
        }
}
static const kvp_options TURN = {.size = sizeof TURN, .allocate = allocate, .release = release_block};

/* ---- refusals: a code and a path, by which a turn is left ---- */

static jmp_buf *refused;
static const char *code, *mine_text = "", *yours_text = "";
static Text where;
static _Noreturn void refuse(const char *error, const char *path) {
    code = error;
    where.size = 0;
    add(&where, path, strlen(path));
    longjmp(*refused, 1);
}
static _Noreturn void deny(const char *error, const char *path, const char *mine, const char *yours) {
    mine_text = mine;
    yours_text = yours;
    refuse(error, path);
}
static void check(int result) { /* of a function of the library */
    if (!result) return;
    if (*refusal.mine || *refusal.yours) deny(kvp_code_name(result), refusal.path, refusal.mine, refusal.yours);
    refuse(kvp_code_name(result), refusal.path);
}

/* ---- values ---- */

static kvp_value field(const kvp_value *map, int id) { return *kvp_field(map, id); }
static bool same(const kvp_value *a, const kvp_value *b) { return a->count == b->count && (!a->count || !memcmp(a->bytes, b->bytes, a->count)); }
static const kvp_value *root_of_json(int layout, const char *json, kvp_message **message) {
    check(kvp_from_json(layout, json, strlen(json), &TURN, message, &refusal));
    return kvp_root(*message);
}
static kvp_value list_of_json(int layout, const char *json) {
    kvp_message *list;
    check(kvp_list_from_json(layout, json, strlen(json), &TURN, &list, &refusal));
    return *kvp_root(list);
}
static void add_message(Text *text, const kvp_message *message, bool frame) { /* encoded */
    int (*encode)(const kvp_message *, void *, size_t, size_t *, kvp_error *) = frame ? kvp_encode : kvp_encode_struct;
    size_t size = 0;
    int result = encode(message, NULL, 0, &size, &refusal);
    if (result != KVP_NO_ROOM) check(result);
    check(encode(message, room_in(text, size), size, &size, &refusal));
    text->size += size;
}
static void sha256(const void *bytes, size_t size, void *digest) { kvp_sha256(bytes, size, digest); }

/* ---- what this engine reads of a Description ---- */

typedef struct { kvp_value name; uint64_t bytes; } Part;
typedef struct { uint64_t id, model, kind, rows, tokens, cp_size, origin; kvp_value name; bool partial, opaque; Part *parts; size_t count; kvp_deal *deal; } Group;
typedef struct { uint64_t part, lo, hi; } Span;
typedef struct { uint64_t id, cp_rank; kvp_value layers; const Group *group; Span *spans; size_t count; } Share;
typedef struct { uint64_t rank; Share *shares; size_t count; } Rank;
typedef struct { kvp_description *description; Group *groups; Rank *ranks; size_t group_count, rank_count; } Side;
typedef struct { const Side *side; uint64_t rank; const Rank *mine; kvp_value columns, windows; } End; /* one side of a rank pair; columns of kind NONE: nobody here knows them */

static Group group_of(const kvp_value *map) {
    kvp_value parts = field(map, KVP_GROUP_PARTS);
    Group group = {.id = kvp_number(map, KVP_GROUP_ID), .model = kvp_number(map, KVP_GROUP_MODEL), .kind = kvp_number(map, KVP_GROUP_KIND), .rows = kvp_number(map, KVP_GROUP_ROWS),
        .tokens = kvp_number(map, KVP_GROUP_TOKENS_PER_ROW), .cp_size = kvp_number(map, KVP_GROUP_CP_SIZE), .origin = kvp_number(map, KVP_GROUP_ORIGIN), .name = field(map, KVP_GROUP_NAME),
        .partial = kvp_number(map, KVP_GROUP_PARTIAL), .parts = get(parts.count * sizeof(Part)), .count = parts.count};
    for (size_t i = 0; i < parts.count; i++) {
        group.parts[i] = (Part){field(&parts.items[i], KVP_PART_NAME), kvp_number(&parts.items[i], KVP_PART_LANE_BYTES)};
        group.opaque |= kvp_field(&parts.items[i], KVP_PART_ENCODING)->kind != KVP_KIND_NONE;
    }
    check(kvp_deal_new(map, &TURN, &group.deal, &refusal));
    return group;
}
static const Group *group_with(const Side *side, uint64_t id) {
    for (size_t i = 0; i < side->group_count; i++)
        if (side->groups[i].id == id) return &side->groups[i];
    return NULL;
}
static Rank rank_of(const Side *side, const kvp_value *map) {
    kvp_value owns = field(map, KVP_RANK_OWNS);
    Rank rank = {.rank = kvp_number(map, KVP_RANK_RANK), .shares = get(owns.count * sizeof(Share)), .count = owns.count};
    for (size_t i = 0; i < owns.count; i++) {
        const kvp_value *each = &owns.items[i];
        kvp_value lanes = field(each, KVP_OWNS_LANES);
        Share *share = &rank.shares[i];
        *share = (Share){.id = kvp_number(each, KVP_OWNS_GROUP), .cp_rank = kvp_number(each, KVP_OWNS_CP_RANK), .layers = field(each, KVP_OWNS_LAYERS), .spans = get(lanes.count * sizeof(Span)), .count = lanes.count};
        share->group = group_with(side, share->id);
        for (size_t j = 0; j < lanes.count; j++)
            share->spans[j] = (Span){kvp_number(&lanes.items[j], KVP_LANE_SPAN_PART), kvp_number(&lanes.items[j], KVP_LANE_SPAN_LO), kvp_number(&lanes.items[j], KVP_LANE_SPAN_HI)};
    }
    return rank;
}
static Side *side_of(const void *geometry, size_t size) {
    Side *side = get(sizeof *side);
    check(kvp_describe(geometry, size, &TURN, &side->description, &refusal));
    const kvp_value *root = kvp_description_root(side->description);
    kvp_value groups = field(root, KVP_GEOMETRY_GROUPS), ranks = field(root, KVP_GEOMETRY_RANKS);
    side->groups = get(groups.count * sizeof(Group));
    side->ranks = get(ranks.count * sizeof(Rank));
    for (; side->group_count < groups.count; side->group_count++) side->groups[side->group_count] = group_of(&groups.items[side->group_count]);
    for (; side->rank_count < ranks.count; side->rank_count++) side->ranks[side->rank_count] = rank_of(side, &ranks.items[side->rank_count]);
    return side;
}
static kvp_program *lowered(const kvp_plan *plan, const End *source, const End *sink, const uint64_t *groups, size_t group_count) {
    kvp_end ends[2] = {{.description = source->side->description, .rank = source->rank, .columns = source->columns.kind ? &source->columns : NULL, .windows = &source->windows},
        {.description = sink->side->description, .rank = sink->rank, .columns = &sink->columns, .windows = &sink->windows, .groups = groups, .group_count = group_count}};
    kvp_program *program;
    check(kvp_lower(plan, &ends[0], &ends[1], &TURN, &program, &refusal));
    return program;
}

/* ---- questions ---- */

static char *text_of(Slice json) { /* of a string, or a number as it stands */
    char *text = get(json.size + 1), *to = text;
    bool string = json.text && *json.text == '"';
    for (size_t i = string; json.text && i < json.size - string; i++) {
        if (json.text[i] != '\\') *to++ = json.text[i];
        else if (json.text[++i] == 'u') {
            unsigned rune = (unsigned)strtoul((char[5]){json.text[i + 1], json.text[i + 2], json.text[i + 3], json.text[i + 4], 0}, NULL, 16);
            if (rune >= 0x800) *to++ = (char)(0xe0 | rune >> 12);
            if (rune >= 0x80) *to++ = (char)(rune >= 0x800 ? 0x80 | (rune >> 6 & 0x3f) : 0xc0 | rune >> 6);
            *to++ = (char)(rune >= 0x80 ? 0x80 | (rune & 0x3f) : rune);
            i += 4;
        } else *to++ = json.text[i];
    }
    return text;
}
