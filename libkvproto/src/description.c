/* Descriptions: what they state, and what is refused of one, in the order of the table of model.md (dcp.md, parts.md, handoff.md). */

typedef struct { kvp_value name, encoding; uint64_t dtype, lanes, bytes, at, whole; size_t first, word; } Part; /* first: of its sections; word: its name by number */
typedef struct { uint64_t layer; const size_t *ranks; size_t count; } Owned;
typedef struct {
    uint64_t id, model, kind, rows, tokens, live, cp_size, interleave, origin;
    kvp_value name, axis, order;
    bool partial, opaque;
    Part *parts;
    size_t count, layers;
    Owned *owned; /* layers, ascending, each with the places of the ranks that own it */
} Group;
typedef struct { uint64_t part, lo, hi; } Span;
typedef struct { uint64_t id, cp_rank; kvp_value layers; Group *group; Span *spans; size_t count; } Share;
typedef struct { uint64_t rank; Share *shares; size_t count; } Rank;
typedef struct { uint64_t model, layer; size_t word; const Group *group; } Claim;
struct kvp_description {
    Arena arena;
    kvp_value root;
    const uint8_t *bytes;
    size_t size;
    uint8_t digest[32];
    uint64_t replica;
    kvp_value facts, without, *words;
    Group *groups;
    Rank *ranks;
    size_t group_count, rank_count, word_count, claim_count, slots;
    Claim *claims; /* a hash table of layers and parts that ranks own */
};
typedef struct kvp_description Side;
enum { PAGE = KVP_ITEM_KIND_PAGE, SLOT = KVP_ITEM_KIND_SLOT, RING = KVP_ITEM_KIND_RING, HANDOFF = KVP_ITEM_KIND_HANDOFF, FIRST_SLOTS = 256 };

static bool is(const kvp_value *text, const char *word) { return text->count == strlen(word) && !memcmp(text->bytes, word, text->count); }
static Group group_of(Work *w, const kvp_value *map) {
    const kvp_value *f = map->items, *parts = &f[Group_parts];
    Group group = {.id = f[Group_id].number, .model = f[Group_model].number, .kind = f[Group_kind].number, .rows = f[Group_rows].number, .tokens = f[Group_tokens_per_row].number,
        .live = f[Group_live_rows].number, .cp_size = f[Group_cp_size].number, .interleave = f[Group_interleave].number, .origin = f[Group_origin].number, .name = f[Group_name],
        .axis = f[Group_axis], .order = f[Group_order], .partial = f[Group_partial].number, .count = parts->count};
    if (!group.axis.kind) group.axis = (kvp_value){.kind = TEXT, .bytes = "tokens", .count = 6};
    if (group.kind == SLOT && !group.live) group.live = group.rows;
    group.parts = get(w, group.count, sizeof(Part));
    for (size_t i = 0; i < group.count; i++) {
        const kvp_value *p = parts->items[i].items;
        Part *part = &group.parts[i];
        *part = (Part){.name = p[Part_name], .encoding = p[Part_encoding], .dtype = p[Part_dtype].number, .lanes = p[Part_lanes].number, .bytes = p[Part_lane_bytes].number,
            .at = p[Part_at].number, .whole = p[Part_whole].number};
        if (!part->whole) part->whole = part->bytes;
        while (!same(&group.parts[part->first].name, &part->name)) part->first++;
        group.opaque |= part->encoding.kind != NONE;
    }
    return group;
}
static Rank rank_of(Work *w, const kvp_value *map) {
    const kvp_value *owns = &map->items[Rank_owns];
    Rank rank = {.rank = map->items[Rank_rank].number, .shares = get(w, owns->count, sizeof(Share)), .count = owns->count};
    for (size_t i = 0; i < owns->count; i++) {
        const kvp_value *f = owns->items[i].items, *lanes = &f[Owns_lanes];
        Share *share = &rank.shares[i];
        *share = (Share){.id = f[Owns_group].number, .cp_rank = f[Owns_cp_rank].number, .layers = f[Owns_layers], .spans = get(w, lanes->count, sizeof(Span)), .count = lanes->count};
        for (size_t j = 0; j < lanes->count; j++) {
            const kvp_value *l = lanes->items[j].items;
            share->spans[j] = (Span){l[LaneSpan_part].number, l[LaneSpan_lo].number, l[LaneSpan_hi].number};
        }
    }
    return rank;
}
static size_t word_of(const Side *side, const kvp_value *name) { /* word_count where there is no such name */
    size_t word = 0;
    while (word < side->word_count && compare(&side->words[word], name)) word++;
    return word;
}
static const Registered *registered(const kvp_value *name) { /* the row of a name, or of the name that it is an alias of */
    for (int i = 0; i < COUNT(PARTS); i++) {
        if (is(name, PARTS[i].name)) return &PARTS[i];
        for (const char *const *alias = PARTS[i].aliases; *alias; alias++)
            if (is(name, *alias)) return &PARTS[i];
    }
    return NULL;
}
const char *kvp_part_named(const char *name, size_t size, bool *optional) {
    const Registered *row = registered(&(kvp_value){.kind = TEXT, .bytes = name, .count = size});
    if (row && optional) *optional = row->optional;
    return row ? row->name : NULL;
}
static const Group *group_with(const Side *side, uint64_t id) { /* they ascend by id */
    size_t lo = 0, hi = side->group_count;
    while (lo < hi) {
        size_t middle = (lo + hi) / 2;
        if (side->groups[middle].id < id) lo = middle + 1;
        else hi = middle;
    }
    return lo < side->group_count && side->groups[lo].id == id ? &side->groups[lo] : NULL;
}
static uint64_t turns(const Group *group) { return group->order.kind ? group->order.count : group->cp_size; }
static uint64_t turn(const Group *group, uint64_t i) { return group->order.kind ? group->order.numbers[i] : i; }

/* ---- what is wrong ---- */

static _Noreturn void bad(Work *w, const char *list, size_t i, const char *inner, size_t j, const char *name, long k, const char *last) {
    Path a = {NULL, list, 0}, b = {&a, NULL, i}, c = {&b, inner, 0}, d = {&c, NULL, j}, e = {inner ? &d : &b, name, 0}, f = {&e, NULL, (size_t)k}, g = {&f, last, 0};
    refuse(w, KVP_E_BAD_GEOMETRY, !name ? &a : k < 0 ? &e : last ? &g : &f);
}
static _Noreturn void bad_group(Work *w, size_t i, const char *name) { bad(w, "groups", i, NULL, 0, name, -1, NULL); }
static _Noreturn void bad_share(Work *w, size_t i, size_t j, const char *name) { bad(w, "ranks", i, "owns", j, name, -1, NULL); }
static void check_parts(Work *w, const Group *group, size_t i) {
    uint64_t *reached = get(w, group->count, sizeof *reached);
    for (size_t j = 0; j < group->count; j++) {
        const Part *part = &group->parts[j], *first = &group->parts[part->first];
        const char *wrong = part->dtype != first->dtype ? "dtype" : part->lanes != first->lanes ? "lanes" : part->whole != first->whole ? "whole"
            : part->at != reached[part->first] ? "at" : part->encoding.kind && (part->whole != part->bytes || part != first) ? "encoding" : NULL;
        if (wrong) bad(w, "groups", i, "parts", j, wrong, -1, NULL);
        reached[part->first] += part->bytes;
    }
    for (size_t first = 0; first < group->count; first++) {
        size_t last = first;
        for (size_t j = first; j < group->count; j++)
            if (group->parts[j].first == first) last = j;
        if (group->parts[first].first == first && reached[first] != group->parts[first].whole) bad(w, "groups", i, "parts", last, "whole", -1, NULL);
    }
}
static void check_deal(Work *w, const Group *group, size_t i) {
    if (group->cp_size == 1) return;
    if (group->kind != PAGE || group->interleave % group->tokens || group->origin % group->tokens) bad_group(w, i, "interleave");
    if (group->order.kind) {
        uint64_t there = 0;
        bool *seen = get(w, group->order.count, sizeof *seen);
        for (size_t j = 0; j < group->order.count; j++) {
            uint64_t cp_rank = group->order.numbers[j];
            if (cp_rank >= group->cp_size || cp_rank >= group->order.count) bad_group(w, i, "order"); /* beyond its count, one of those below is missing */
            there += !seen[cp_rank];
            seen[cp_rank] = true;
        }
        if (there != group->cp_size) bad_group(w, i, "order");
    }
    if (turns(group) * group->interleave > KVP_MAX_DEAL) bad_group(w, i, group->order.kind ? "order" : "cp_size");
}
static void check_group(Work *w, const Group *group, size_t i) {
    check_parts(w, group, i);
    for (size_t j = 0; j < group->count && group->kind == HANDOFF; j++)
        if (group->parts[j].lanes != 1 || group->parts[j].whole != group->parts[j].bytes) bad_group(w, i, "kind");
    if (group->kind == HANDOFF && (group->model || group->rows != 1 || group->tokens != 1)) bad_group(w, i, "kind");
    if (group->partial && group->kind != PAGE && group->kind != RING) bad_group(w, i, "partial");
    const Registered **names = room_for(w, group->count, sizeof *names);
    for (size_t j = 0; j < group->count; j++) {
        names[j] = registered(&group->parts[j].name);
        for (size_t k = 0; k < j; k++)
            if (names[j] && names[j] == names[k] && !same(&group->parts[j].name, &group->parts[k].name)) bad_group(w, i, "parts");
    }
    check_deal(w, group, i);
}
static Claim *claim_of(const Side *side, uint64_t model, size_t word, uint64_t layer) { /* where it is, or is to be */
    uint64_t hash = ((model * 31 + word) * 0x9e3779b97f4a7c15 + layer) * 0xbf58476d1ce4e5b9 >> 40;
    Claim *claim = &side->claims[hash % side->slots];
    while (claim->group && (claim->model != model || claim->word != word || claim->layer != layer))
        if (++claim == side->claims + side->slots) claim = side->claims;
    return claim;
}
static void make_slots(Work *w, Side *side, size_t slots) {
    Claim *before = side->claims;
    size_t count = side->slots;
    side->claims = get(w, slots, sizeof *side->claims);
    side->slots = slots;
    for (size_t i = 0; i < count; i++)
        if (before[i].group) *claim_of(side, before[i].model, before[i].word, before[i].layer) = before[i];
}
static void claim(Work *w, Side *side, const Share *share, size_t i, size_t j) {
    const Group *group = share->group;
    for (size_t k = 0; k < group->count; k++)
        for (size_t n = 0; n < share->layers.count; n++) {
            if (2 * side->claim_count >= side->slots) make_slots(w, side, 4 * side->slots);
            Claim *claim = claim_of(side, group->model, group->parts[k].word, share->layers.numbers[n]);
            if (claim->group && claim->group != group) bad_share(w, i, j, "layers");
            side->claim_count += !claim->group;
            *claim = (Claim){group->model, share->layers.numbers[n], group->parts[k].word, group};
        }
    if (side->claim_count > KVP_MAX_LAYERS) bad_share(w, i, j, "layers");
}
static void check_share(Work *w, Side *side, size_t i, size_t j) {
    Share *share = &side->ranks[i].shares[j];
    const Group *group = share->group = (Group *)group_with(side, share->id);
    if (!group) bad_share(w, i, j, "group");
    if (group->kind == HANDOFF && (share->layers.count != 1 || share->layers.numbers[0])) bad_share(w, i, j, "layers");
    if (share->cp_rank >= group->cp_size) bad_share(w, i, j, "cp_rank");
    bool *there = get(w, group->count, sizeof *there);
    for (size_t k = 0; k < share->count; k++) {
        const Span *span = &share->spans[k];
        if (span->part >= group->count) bad(w, "ranks", i, "owns", j, "lanes", (long)k, "part");
        if (span->hi > group->parts[span->part].lanes) bad(w, "ranks", i, "owns", j, "lanes", (long)k, "hi");
        there[span->part] = true;
    }
    for (size_t k = 0; k < share->count; k++)
        for (size_t n = k; n && share->spans[n - 1].part == share->spans[k].part; n--)
            if (share->spans[n - 1].lo < share->spans[k].hi && share->spans[k].lo < share->spans[n - 1].hi) bad_share(w, i, j, "lanes");
    for (size_t k = 0; k < group->count; k++)
        if (!there[k]) bad_share(w, i, j, "lanes");
    claim(w, side, share, i, j);
}
static void check_sizes(Work *w, const Side *side) {
    uint64_t parts = 0, runs = 0, claims = 0, most = 0;
    for (size_t i = 0; i < side->group_count; i++) {
        parts += side->groups[i].count;
        runs += side->groups[i].order.count;
    }
    if (parts > KVP_MAX_PARTS || runs > KVP_MAX_RUNS) bad(w, "groups", 0, NULL, 0, NULL, -1, NULL);
    for (size_t i = 0; i < side->rank_count; i++) {
        uint64_t mine = 0;
        for (size_t j = 0; j < side->ranks[i].count; j++) {
            const Share *share = &side->ranks[i].shares[j];
            const Group *group = group_with(side, share->id);
            for (size_t k = 0; k < share->count; k++) {
                const Part *part = group && share->spans[k].part < group->count ? &group->parts[share->spans[k].part] : NULL;
                mine += share->layers.count * (part && part->whole != part->bytes ? share->spans[k].hi - share->spans[k].lo : 1);
            }
        }
        claims += mine;
        most = mine > most ? mine : most;
    }
    if (side->rank_count > KVP_MAX_RANKS || claims > KVP_MAX_CLAIMS || most > KVP_MAX_RANK_CLAIMS) bad(w, "ranks", 0, NULL, 0, NULL, -1, NULL);
}

/* ---- who owns which layer ---- */

static int by_owner(const void *a, const void *b, const void *context) { /* of {layer, rank} */
    const uint64_t *x = a, *y = b;
    (void)context;
    return x[0] != y[0] ? (x[0] > y[0]) - (x[0] < y[0]) : (x[1] > y[1]) - (x[1] < y[1]);
}
static void find_owners(Work *w, const Side *side, Group *group) {
    size_t count = 0, n = 0;
    for (size_t i = 0; i < side->rank_count; i++)
        for (size_t j = 0; j < side->ranks[i].count; j++)
            if (side->ranks[i].shares[j].group == group) count += side->ranks[i].shares[j].layers.count;
    uint64_t(*pairs)[2] = room_for(w, count, sizeof *pairs);
    size_t *ranks = room_for(w, count, sizeof *ranks);
    for (size_t i = 0; i < side->rank_count; i++)
        for (size_t j = 0; j < side->ranks[i].count; j++) {
            const Share *share = &side->ranks[i].shares[j];
            for (size_t k = 0; share->group == group && k < share->layers.count; k++, n++) {
                pairs[n][0] = share->layers.numbers[k];
                pairs[n][1] = i;
            }
        }
    sort(w, pairs, count, sizeof *pairs, by_owner, NULL);
    group->owned = get(w, count, sizeof(Owned));
    for (size_t i = 0; i < count; i++) {
        ranks[i] = (size_t)pairs[i][1];
        if (!i || pairs[i][0] != pairs[i - 1][0]) group->owned[group->layers++] = (Owned){pairs[i][0], ranks + i, 0};
        group->owned[group->layers - 1].count++;
    }
}

/* ---- the handle ---- */

static Side *side_of_map(Work *w, const kvp_value *map) {
    const kvp_value *groups = &map->items[Geometry_groups], *ranks = &map->items[Geometry_ranks];
    Side *side = get(w, 1, sizeof *side);
    *side = (Side){.root = *map, .replica = map->items[Geometry_replica].number, .facts = map->items[Geometry_facts], .without = map->items[Geometry_without],
        .groups = get(w, groups->count, sizeof(Group)), .ranks = get(w, ranks->count, sizeof(Rank)), .group_count = groups->count, .rank_count = ranks->count};
    for (size_t i = 0; i < groups->count; i++) side->groups[i] = group_of(w, &groups->items[i]);
    for (size_t i = 0; i < ranks->count; i++) side->ranks[i] = rank_of(w, &ranks->items[i]);
    check_sizes(w, side);
    for (size_t i = 0; i < groups->count; i++) check_group(w, &side->groups[i], i);
    side->words = room_for(w, KVP_MAX_PARTS, sizeof(kvp_value));
    for (size_t i = 0; i < groups->count; i++)
        for (size_t j = 0; j < side->groups[i].count; j++) {
            Part *part = &side->groups[i].parts[j];
            part->word = word_of(side, &part->name);
            if (part->word == side->word_count) side->words[side->word_count++] = part->name;
        }
    make_slots(w, side, FIRST_SLOTS);
    for (size_t i = 0; i < ranks->count; i++)
        for (size_t j = 0; j < side->ranks[i].count; j++) check_share(w, side, i, j);
    for (size_t i = 0; i < groups->count; i++) find_owners(w, side, &side->groups[i]);
    return side;
}
typedef struct { const uint8_t *bytes; size_t size; const kvp_message *message; Side *made; } Stated;
static void describe(Work *w, void *arguments) {
    Stated *stated = arguments;
    const Layout *geometry = &LAYOUTS[L_Geometry];
    Out out = {0};
    if (stated->message) {
        put_map(&out, geometry, &stated->message->root);
        check_map(w, geometry, &stated->message->root, out.beyond, NULL);
    }
    size_t size = stated->message ? out.size : stated->size;
    if (size > KVP_MAX_GEOMETRY) refuse(w, KVP_E_BAD_GEOMETRY, &(Path){NULL, "geometry", 0});
    uint8_t *bytes = room_for(w, size, 1);
    out = (Out){.bytes = bytes, .room = size};
    if (stated->message) put_map(&out, geometry, &stated->message->root);
    else if (size) memcpy(bytes, stated->bytes, size);
    kvp_value root = body(w, geometry, bytes, size);
    Side *side = side_of_map(w, &root);
    side->bytes = bytes;
    side->size = size;
    kvp_sha256(bytes, size, side->digest);
    side->arena = w->arena;
    stated->made = side;
}
int kvp_describe(const void *geometry, size_t size, const kvp_options *options, kvp_description **description, kvp_error *error) {
    Work w;
    Stated stated = {.bytes = geometry, .size = size};
    int code = attempt(&w, options, error, describe, &stated);
    *description = stated.made;
    return code;
}
int kvp_describe_message(const kvp_message *geometry, const kvp_options *options, kvp_description **description, kvp_error *error) {
    Work w;
    Stated stated = {.message = geometry};
    int code = geometry && geometry->layout == &LAYOUTS[L_Geometry] && geometry->root.kind == MAP && !geometry->wrong ? attempt(&w, options, error, describe, &stated) : misused(error);
    *description = stated.made;
    return code;
}
const void *kvp_description_bytes(const kvp_description *description, size_t *size) {
    *size = description->size;
    return description->bytes;
}
void kvp_description_digest(const kvp_description *description, uint8_t digest[32]) { memcpy(digest, description->digest, 32); }
const kvp_value *kvp_description_root(const kvp_description *description) { return &description->root; }
void kvp_description_free(kvp_description *description) {
    if (description) release(&description->arena);
}
