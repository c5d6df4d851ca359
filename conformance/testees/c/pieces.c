/* The pieces of a plan of kvproto in C11: what is paired, compared and cut, made from spec/v1/planning.md alone. plan.c includes it.
 * Lists that grow are of the kind Text, their elements one after the other. */
#include "description.c"

/* ---- pairs: what is compared, in the order of the table of planning.md ---- */

typedef struct { const size_t *ranks; size_t count; } Ranks; /* places of ranks in their side, ascending */
typedef struct { const Group *group; size_t part; uint64_t layer, lo, hi; Pair classes; Ranks candidates, needy; uint64_t first_unit; } Piece;
typedef struct { const Side *source, *sink; bool spread_one, few_sources, cold_draft; uint64_t pieces, shares; Classes *classes; } Plan;
static Text pieces, rows, cut_pieces, intervals[2], covers[2]; /* rows of twelve numbers; of source and sink */

static _Noreturn void unlike(const char *error, const Group *group, const Part *part, const char *name) { /* groups[g].parts[p].name */
    Text path = {0};
    add(&path, "groups[", 7);
    add(&path, group->name.bytes, group->name.count);
    if (part) {
        add(&path, "].parts[", 8);
        add(&path, part->name.bytes, part->name.count);
    }
    add(&path, "]", 1);
    char *kept = get(path.size + 1);
    memcpy(kept, path.text, path.size);
    free(path.text);
    Path whole = {NULL, kept, 0};
    refuse(error, name ? &(Path){&whole, name, 0} : &whole);
}
static void compare_facts(const Side *a, const Side *b) {
    for (size_t i = 0, j = 0; i < a->facts.count || j < b->facts.count;) {
        const Node *x = i < a->facts.count ? &a->facts.items[i] : NULL, *y = j < b->facts.count ? &b->facts.items[j] : NULL;
        Node mine = x ? field(L_Fact, x, "name") : (Node){0}, yours = y ? field(L_Fact, y, "name") : (Node){0};
        int order = !x ? 1 : !y ? -1 : compare(&mine, &yours);
        bool differs = order != 0, equal = (order <= 0 && number(L_Fact, x, "rule") == 1) || (order >= 0 && number(L_Fact, y, "rule") == 1);
        if (!order) {
            Node value = field(L_Fact, x, "value"), other = field(L_Fact, y, "value");
            differs = compare(&value, &other);
        }
        const Node *name = order <= 0 ? &mine : &yours;
        if (differs && equal) {
            char *path = get(name->count + 8);
            snprintf(path, name->count + 8, "facts[%.*s]", (int)name->count, name->bytes);
            refuse("IDENTITY_MISMATCH", &(Path){NULL, path, 0});
        }
        i += order <= 0;
        j += order >= 0;
    }
}
static bool same_deal(const Group *a, const Group *b) {
    if (a->cp_size == 1 && b->cp_size == 1) return true;
    bool equal = a->cp_size == b->cp_size && a->interleave == b->interleave && a->origin == b->origin && turns(a) == turns(b);
    for (uint64_t i = 0; equal && (a->order.kind || b->order.kind) && i < turns(a); i++) equal = turn(a, i) == turn(b, i);
    return equal;
}
static const Part *part_named(const Group *group, const Node *name) {
    for (size_t i = 0; i < group->count; i++)
        if (same(&group->parts[i].name, name)) return &group->parts[i];
    return NULL;
}
static const Classes *classes_known(Plan *plan, const Group *source, const Group *sink, const Part *part) {
    for (const Classes *known = plan->classes; known; known = known->next)
        if (known->source == source && known->sink == sink) return known;
    plan->pieces += (source->cp_size > 1 ? turns(source) : 0) + (sink->cp_size > 1 ? turns(sink) : 0);
    if (plan->pieces > MAX_PIECES) unlike("TOO_LARGE", sink, part, NULL);
    Classes *found = get(sizeof *found);
    *found = classes_of(source, sink);
    found->next = plan->classes;
    plan->classes = found;
    return found;
}
static void compare_groups(const Group *from, const Group *group, const Part *part) {
    const Part *other = part_named(from, &part->name);
    bool rows_alike = (from->kind == PAGE || from->kind == RING) && (group->kind == PAGE || group->kind == RING) && !group->opaque;
    if (from->kind != group->kind && !rows_alike) unlike("KIND_MISMATCH", group, NULL, "kind");
    if (!same(&from->axis, &group->axis)) unlike("AXIS_MISMATCH", group, NULL, "axis");
    if (other->dtype != part->dtype) unlike("DTYPE_MISMATCH", group, part, "dtype");
    if (other->lanes * other->whole != part->lanes * part->whole) unlike("LANE_MISMATCH", group, part, "lanes");
    if (from->tokens != group->tokens) unlike("ROW_MISMATCH", group, NULL, "tokens_per_row");
    if (from->live != group->live) unlike("ROW_MISMATCH", group, NULL, "live_rows");
    if (from->partial != group->partial) unlike("ROW_MISMATCH", group, NULL, "partial");
    if (!same(&other->encoding, &part->encoding)) unlike("LAYOUT_OPAQUE", group, part, "encoding");
    if (other->whole % part->whole && part->whole % other->whole) unlike("LANE_MISMATCH", group, part, "lane_bytes");
    bool bytes = !part->encoding.kind || other->bytes == part->bytes;
    if (group->opaque && (from->rows != group->rows || !bytes || !same_deal(from, group))) unlike("LAYOUT_OPAQUE", group, NULL, "rows");
    if (from->cp_size * group->cp_size > MAX_CLASS_PAIRS) unlike("ROW_MISMATCH", group, NULL, "cp_size");
}

/* ---- cuts: pieces of the lane axis, each with its candidates and its needy ranks ---- */

typedef struct { uint64_t lo, hi; size_t rank; uint64_t cp_rank; } Interval;
typedef struct { size_t cut; uint64_t cp_rank; size_t rank; } Cover;
static const Share *share_of(const Side *side, size_t rank, const Group *group) {
    const Share *share = side->ranks[rank].shares;
    while (share->group != group) share++;
    return share;
}
static int order_of_spans(const Share *a, size_t p, const Share *b, size_t q) { /* of one part each, as lists */
    size_t i = 0, j = 0;
    for (;; i++, j++) {
        while (i < a->count && a->spans[i].part != p) i++;
        while (j < b->count && b->spans[j].part != q) j++;
        if (i == a->count || j == b->count) return (j == b->count) - (i == a->count);
        const Span *x = &a->spans[i], *y = &b->spans[j];
        if (x->lo != y->lo || x->hi != y->hi) return x->lo != y->lo ? (x->lo > y->lo) - (x->lo < y->lo) : (x->hi > y->hi) - (x->hi < y->hi);
    }
}
/* Intervals, in bytes, of the ranks of a layer; of a family those alone that have the spans of its first member. */
static void intervals_of(Text *found, const Side *side, const Group *group, size_t first, Ranks ranks, const Share *family, size_t family_part) {
    for (size_t i = 0; i < ranks.count; i++) {
        const Share *share = share_of(side, ranks.ranks[i], group);
        if (family && order_of_spans(family, family_part, share, first)) continue;
        for (size_t j = 0; j < share->count; j++) {
            const Part *part = &group->parts[share->spans[j].part];
            if (part->first != first) continue;
            const Span *span = &share->spans[j];
            if (part->whole == part->bytes) {
                add(found, &(Interval){span->lo * part->whole, span->hi * part->whole, ranks.ranks[i], share->cp_rank}, sizeof(Interval));
                continue;
            }
            for (uint64_t lane = span->lo; lane < span->hi; lane++) {
                uint64_t begin = lane * part->whole + part->at;
                add(found, &(Interval){begin, begin + part->bytes, ranks.ranks[i], share->cp_rank}, sizeof(Interval));
            }
        }
    }
}
static int by_number(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}
static int by_cover(const void *a, const void *b) {
    const Cover *x = a, *y = b;
    if (x->cut != y->cut) return x->cut > y->cut ? 1 : -1;
    if (x->cp_rank != y->cp_rank) return x->cp_rank > y->cp_rank ? 1 : -1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}
static size_t cut_at(const uint64_t *cuts, size_t count, uint64_t byte) {
    const uint64_t *found = bsearch(&byte, cuts, count, sizeof *cuts, by_number);
    return (size_t)(found - cuts);
}
/* Which ranks of which class have each piece: intervals become covers, sorted. Their number is that of the pieces. */
static uint64_t covered(Text *covers, const Text *intervals, const uint64_t *cuts, size_t count, bool fill) {
    uint64_t all = 0;
    const Interval *each = (const Interval *)intervals->text;
    for (size_t i = 0; i < intervals->size / sizeof *each; i++) {
        size_t lo = cut_at(cuts, count, each[i].lo), hi = cut_at(cuts, count, each[i].hi);
        all += hi - lo;
        for (size_t cut = lo; fill && cut < hi; cut++) add(covers, &(Cover){cut, each[i].cp_rank, each[i].rank}, sizeof(Cover));
    }
    if (fill && covers->size) qsort(covers->text, covers->size / sizeof(Cover), sizeof(Cover), by_cover);
    return all;
}
static Ranks ranks_at(const Text *covers, size_t cut, uint64_t cp_rank) {
    const Cover *each = (const Cover *)covers->text;
    size_t lo = 0, hi = covers->size / sizeof *each, count = hi;
    while (lo < hi) {
        size_t middle = (lo + hi) / 2;
        if (each[middle].cut < cut || (each[middle].cut == cut && each[middle].cp_rank < cp_rank)) lo = middle + 1;
        else hi = middle;
    }
    size_t last = lo;
    while (last < count && each[last].cut == cut && each[last].cp_rank == cp_rank) last++;
    size_t *ranks = get((last - lo) * sizeof *ranks);
    for (size_t i = lo; i < last; i++) ranks[i - lo] = each[i].rank;
    return (Ranks){ranks, last - lo};
}

static bool same_ranks(const Owned *a, const Owned *b) { return a->count == b->count && !memcmp(a->ranks, b->ranks, a->count * sizeof *a->ranks); }
typedef struct { const Group *from; const Owned *source, *sink; } Layer; /* a layer of a part of a sink group, and what it is read from */
static bool one_set(const Layer *a, const Layer *b) { return a->from == b->from && same_ranks(a->source, b->source) && same_ranks(a->sink, b->sink); }

/* The pieces of the layers of one set, and of one family of it where the part is encoded. */
static void cut(Plan *plan, const Group *group, size_t p, const Layer *layers, size_t count, const Share *family) {
    const Part *part = &group->parts[p], *other = part_named(layers->from, &part->name);
    const Classes *classes = classes_known(plan, layers->from, group, part);
    size_t q = (size_t)(other - layers->from->parts), cut_count = 0, set = 0, runs = 0;
    for (int i = 0; i < 2; i++) intervals[i].size = covers[i].size = 0;
    intervals_of(&intervals[0], plan->source, layers->from, q, (Ranks){layers->source->ranks, layers->source->count}, family, p);
    intervals_of(&intervals[1], plan->sink, group, p, (Ranks){layers->sink->ranks, layers->sink->count}, family, p);
    if (family && !intervals[0].size) unlike("LAYOUT_OPAQUE", group, part, NULL);
    const size_t all = (intervals[0].size + intervals[1].size) / sizeof(Interval);
    uint64_t *cuts = get((2 * all + 2) * sizeof *cuts), larger = part->whole > other->whole ? part->whole : other->whole;
    for (int i = 0; i < 2; i++)
        for (size_t n = 0; n < intervals[i].size / sizeof(Interval); n++) {
            cuts[cut_count++] = ((const Interval *)intervals[i].text)[n].lo;
            cuts[cut_count++] = ((const Interval *)intervals[i].text)[n].hi;
        }
    cuts[cut_count++] = 0;
    cuts[cut_count++] = part->lanes * part->whole;
    qsort(cuts, cut_count, sizeof *cuts, by_number);
    size_t kept = 1;
    for (size_t i = 1; i < cut_count; i++)
        if (cuts[i] != cuts[kept - 1]) cuts[kept++] = cuts[i];
    plan->pieces += covered(NULL, &intervals[0], cuts, kept, false) + covered(NULL, &intervals[1], cuts, kept, false) + kept * classes->count;
    if (plan->pieces > MAX_PIECES) unlike("TOO_LARGE", group, part, NULL);
    for (int i = 0; i < 2; i++) covered(&covers[i], &intervals[i], cuts, kept, true);
    for (size_t i = 0, last = 0; i < count; i++) {
        if (!one_set(layers, &layers[i])) continue;
        runs += !set || layers[i].sink->layer != layers[last].sink->layer + 1;
        set++;
        last = i;
    }
    bool few = false, bytes = part->whole != other->whole, sections = part->bytes != part->whole || other->bytes != other->whole;
    uint64_t lane = sections ? part->whole + other->whole - larger : larger, needed = 0, needed_lanes = 0;
    cut_pieces.size = 0;
    for (size_t i = 0; i + 1 < kept; i++)
        for (size_t n = 0; n < classes->count; n++) {
            Piece piece = {.group = group, .part = p, .lo = cuts[i], .hi = cuts[i + 1], .classes = classes->pairs[n], .needy = ranks_at(&covers[1], i, classes->pairs[n].sink)};
            if (!piece.needy.count) continue;
            piece.candidates = ranks_at(&covers[0], i, classes->pairs[n].source);
            if (!piece.candidates.count) unlike("COVERAGE", group, part, NULL);
            few |= piece.needy.count < piece.candidates.count;
            needed += piece.needy.count;
            needed_lanes += piece.needy.count * ((piece.hi - 1) / lane - piece.lo / lane + 1);
            add(&cut_pieces, &piece, sizeof piece);
        }
    plan->shares += bytes ? needed_lanes * set : needed * (few ? set : runs);
    if (plan->shares > MAX_SHARES) unlike("TOO_LARGE", group, part, NULL);
    for (size_t i = 0; i < count; i++)
        for (size_t n = 0; one_set(layers, &layers[i]) && n < cut_pieces.size / sizeof(Piece); n++) {
            Piece piece = ((const Piece *)cut_pieces.text)[n];
            piece.layer = layers[i].sink->layer;
            add(&pieces, &piece, sizeof piece);
        }
}
static void cut_families(Plan *plan, const Group *group, size_t p, const Layer *layers, size_t count) {
    const Share *before = NULL;
    for (;;) { /* each time the least of those that come after the one before */
        const Share *next = NULL;
        for (size_t i = 0; i < layers->sink->count; i++) {
            const Share *share = share_of(plan->sink, layers->sink->ranks[i], group);
            if ((!before || order_of_spans(share, p, before, p) > 0) && (!next || order_of_spans(share, p, next, p) < 0)) next = share;
        }
        if (!next) return;
        cut(plan, group, p, layers, count, next);
        before = next;
    }
}
static bool is_cold(const Plan *plan, uint64_t model) {
    if (!plan->cold_draft || !model) return false;
    for (size_t i = 0; i < plan->source->group_count; i++)
        if (plan->source->groups[i].model == model && plan->source->groups[i].layers) return false;
    return true;
}
static const Owned *owned_of(const Group *group, uint64_t layer) {
    const Owned *owned = group->owned;
    while (owned->layer != layer) owned++;
    return owned;
}
static void pair_part(Plan *plan, const Group *group, size_t p) {
    const Part *part = &group->parts[p];
    size_t word = word_of(plan->source, &part->name);
    bool there = false;
    for (size_t i = 0; i < plan->source->group_count; i++) {
        const Group *from = &plan->source->groups[i];
        there |= from->model == group->model && from->layers && part_named(from, &part->name);
    }
    Layer *layers = get(group->layers * sizeof *layers);
    for (size_t i = 0; i < group->layers; i++) {
        const Claim *claim = claim_of(plan->source, group->model, word, group->owned[i].layer);
        if (claim->group) layers[i] = (Layer){claim->group, owned_of(claim->group, claim->layer), &group->owned[i]};
    }
    for (size_t i = 0; i < group->layers; i++) {
        if (!there) unlike("PART_MISSING", group, part, NULL);
        if (!layers[i].from) unlike("LAYER_MISSING", group, part, NULL);
        compare_groups(layers[i].from, group, part);
        classes_known(plan, layers[i].from, group, part);
        bool seen = false;
        for (size_t j = 0; j < i && !seen; j++) seen = one_set(&layers[j], &layers[i]);
        if (seen) continue;
        if (part->encoding.kind) cut_families(plan, group, p, layers + i, group->layers - i);
        else cut(plan, group, p, layers + i, group->layers - i, NULL);
    }
}
static bool is_optional(const Node *name) { return registered(name) && registered(name)->optional; }
static bool may_be_left(const Plan *plan, const Node *name) {
    if (is_optional(name)) return true;
    const Node *without = &plan->sink->without;
    for (size_t i = 0; without->kind && i < without->count; i++)
        if (!compare(&without->items[i], name)) return true;
    return false;
}
static void check_left(const Plan *plan, const Group *group, const Part *part) {
    if (group->kind == HANDOFF || is_optional(&part->name)) return;
    for (size_t word = 0; word < plan->source->word_count; word++) {
        const Node *name = &plan->source->words[word];
        if (may_be_left(plan, name)) continue;
        size_t taken = word_of(plan->sink, name);
        for (size_t n = 0; n < group->layers; n++) {
            const Group *there = claim_of(plan->source, group->model, word, group->owned[n].layer)->group;
            if (there && there->kind != HANDOFF && !claim_of(plan->sink, group->model, taken, group->owned[n].layer)->group) unlike("PART_MISSING", group, part, NULL);
        }
    }
}
