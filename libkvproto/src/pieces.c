/* The pieces of a plan: what is paired, compared and cut (planning.md, steps 1 to 3). */

/* ---- classes of tokens: pairs of cp ranks that share rows ---- */

typedef struct { uint64_t source, sink; } Pair;
typedef struct Classes { const Group *source, *sink; Pair *pairs; uint64_t *met[2]; size_t *first; struct Classes *next; } Classes;
/* met: with how many cp ranks of the other side each of the source, and of the sink, shares rows; first: where the pairs of each of the sink begin */

static bool meet(const Group *source, uint64_t i, const Group *sink, uint64_t j) { /* whether run i of the one and run j of the other ever share a token */
    uint64_t a = greatest_divisor(source->interleave * turns(source), sink->interleave * turns(sink));
    /* begin of the sink's run less that of the source's, modulo the greatest common divisor of both periods; they meet in (-sink's run, source's run) */
    uint64_t apart = ((sink->origin % a + j * sink->interleave % a) % a + a - (source->origin % a + i * source->interleave % a) % a) % a;
    return (apart + sink->interleave - 1) % a < source->interleave + sink->interleave - 1;
}
static void find_classes(Work *w, Classes *classes) {
    const Group *source = classes->source, *sink = classes->sink;
    const uint64_t all = source->cp_size * sink->cp_size;
    classes->pairs = room_for(w, all, sizeof(Pair));
    classes->met[0] = get(w, source->cp_size, sizeof(uint64_t));
    classes->met[1] = get(w, sink->cp_size, sizeof(uint64_t));
    classes->first = get(w, sink->cp_size, sizeof(size_t));
    bool *there = get(w, all, sizeof *there), dealt = source->cp_size > 1 && sink->cp_size > 1;
    for (uint64_t i = 0; dealt && i < turns(source); i++)
        for (uint64_t j = 0; j < turns(sink); j++) {
            bool *here = &there[turn(source, i) * sink->cp_size + turn(sink, j)];
            *here = *here || meet(source, i, sink, j);
        }
    for (uint64_t i = 0, count = 0; i < all; i++) {
        Pair pair = {i % source->cp_size, i / source->cp_size};
        if (!pair.source) classes->first[pair.sink] = count;
        if (dealt && !there[pair.source * sink->cp_size + pair.sink]) continue;
        classes->met[0][pair.source]++;
        classes->met[1][pair.sink]++;
        classes->pairs[count++] = pair;
    }
}

/* ---- pairs: what is compared, in the order of the table of planning.md ---- */

typedef struct { const size_t *ranks; size_t count; } Ranks; /* places of ranks in their side, ascending */
typedef struct { const Group *group; size_t part; uint64_t layer, layers, lo, hi; Pair classes; Ranks candidates, needy; uint64_t first_unit; } Piece; /* layers: after the last */
typedef struct {
    const Side *source, *sink;
    bool spread_one, few_sources, cold_draft;
    uint64_t runs, counted; /* as KVP-PLAN-RUNS and KVP-PLAN-SIZE count */
    Classes *classes;
    Text pieces, rows, cut, intervals[2], covers[2]; /* rows of twelve numbers; of source and sink */
} Planner;

static _Noreturn void unlike(Work *w, int code, const Group *group, const Part *part, const char *name) { /* groups[g].parts[p].name */
    size_t size = group->name.count + (part ? part->name.count : 0) + 32;
    char *path = room_for(w, size, 1);
    snprintf(path, size, "groups[%.*s]%s%.*s%s", (int)group->name.count, group->name.bytes, part ? ".parts[" : "", part ? (int)part->name.count : 0, part ? part->name.bytes : "", part ? "]" : "");
    Path whole = {NULL, path, 0};
    refuse(w, code, name ? &(Path){&whole, name, 0} : &whole);
}
static void state_texts(Work *w, const kvp_value *mine, const kvp_value *yours) {
    put_words(w->error->mine, KVP_WORDS, mine->kind ? mine->bytes : "none", mine->kind ? mine->count : 4);
    put_words(w->error->yours, KVP_WORDS, yours->kind ? yours->bytes : "none", yours->kind ? yours->count : 4);
}
static void state_values(Work *w, int enumeration, uint64_t mine, uint64_t yours) { /* by name, if they have one */
    const char *names[2] = {kvp_value_name(enumeration, mine), kvp_value_name(enumeration, yours)};
    char *into[2] = {w->error->mine, w->error->yours};
    for (int i = 0; i < 2; i++)
        if (names[i]) put_words(into[i], KVP_WORDS, names[i], strlen(names[i]));
        else snprintf(into[i], KVP_WORDS, "%llu", (unsigned long long)(i ? yours : mine));
}
static void check_equal(Work *w, int code, const Group *group, const Part *part, const char *name, int enumeration, uint64_t mine, uint64_t yours) {
    if (mine == yours) return;
    state_values(w, enumeration, mine, yours);
    unlike(w, code, group, part, name);
}
static void check_text(Work *w, int code, const Group *group, const Part *part, const char *name, const kvp_value *mine, const kvp_value *yours) {
    if (same(mine, yours)) return;
    state_texts(w, mine, yours);
    unlike(w, code, group, part, name);
}
static void compare_facts(Work *w, const Side *a, const Side *b) {
    for (size_t i = 0, j = 0; i < a->facts.count || j < b->facts.count;) {
        const kvp_value *x = i < a->facts.count ? a->facts.items[i].items : NULL, *y = j < b->facts.count ? b->facts.items[j].items : NULL;
        int order = !x ? 1 : !y ? -1 : compare(&x[Fact_name], &y[Fact_name]);
        const uint64_t EQUAL = KVP_FACT_RULE_EQUAL;
        bool differs = order || compare(&x[Fact_value], &y[Fact_value]), equal = (order <= 0 && x[Fact_rule].number == EQUAL) || (order >= 0 && y[Fact_rule].number == EQUAL);
        if (differs && equal) {
            const kvp_value *name = order <= 0 ? &x[Fact_name] : &y[Fact_name];
            char *path = room_for(w, name->count + 8, 1);
            snprintf(path, name->count + 8, "facts[%.*s]", (int)name->count, name->bytes);
            state_texts(w, order <= 0 ? &x[Fact_value] : &ABSENT, order >= 0 ? &y[Fact_value] : &ABSENT);
            refuse(w, KVP_E_IDENTITY_MISMATCH, &(Path){NULL, path, 0});
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
static const Part *part_named(const Group *group, const kvp_value *name) {
    for (size_t i = 0; i < group->count; i++)
        if (same(&group->parts[i].name, name)) return &group->parts[i];
    return NULL;
}
static const Classes *classes_known(Work *w, Planner *plan, const Group *source, const Group *sink, const Part *part) {
    for (const Classes *known = plan->classes; known; known = known->next)
        if (known->source == source && known->sink == sink) return known;
    plan->runs += (source->cp_size > 1 ? turns(source) : 0) + (sink->cp_size > 1 ? turns(sink) : 0);
    if (plan->runs > KVP_MAX_RUNS) unlike(w, KVP_E_TOO_LARGE, sink, part, NULL);
    Classes *found = get(w, 1, sizeof *found);
    *found = (Classes){.source = source, .sink = sink, .next = plan->classes};
    find_classes(w, found);
    return plan->classes = found;
}
static void compare_groups(Work *w, const Group *from, const Group *group, const Part *part) {
    const Part *other = part_named(from, &part->name);
    bool rows_alike = (from->kind == PAGE || from->kind == RING) && (group->kind == PAGE || group->kind == RING) && !group->opaque;
    if (!rows_alike) check_equal(w, KVP_E_KIND_MISMATCH, group, NULL, "kind", KVP_ENUM_ITEM_KIND, from->kind, group->kind);
    check_text(w, KVP_E_AXIS_MISMATCH, group, NULL, "axis", &from->axis, &group->axis);
    check_equal(w, KVP_E_DTYPE_MISMATCH, group, part, "dtype", KVP_ENUM_DTYPE, other->dtype, part->dtype);
    check_equal(w, KVP_E_LANE_MISMATCH, group, part, "lanes", -1, other->lanes * other->whole, part->lanes * part->whole);
    check_equal(w, KVP_E_ROW_MISMATCH, group, NULL, "tokens_per_row", -1, from->tokens, group->tokens);
    check_equal(w, KVP_E_ROW_MISMATCH, group, NULL, "live_rows", -1, from->live, group->live);
    check_equal(w, KVP_E_ROW_MISMATCH, group, NULL, "partial", -1, from->partial, group->partial);
    check_text(w, KVP_E_LAYOUT_OPAQUE, group, part, "encoding", &other->encoding, &part->encoding);
    if (other->whole % part->whole && part->whole % other->whole) check_equal(w, KVP_E_LANE_MISMATCH, group, part, "lane_bytes", -1, other->whole, part->whole);
    bool bytes = !part->encoding.kind || other->bytes == part->bytes;
    if (group->opaque && (from->rows != group->rows || !bytes || !same_deal(from, group))) {
        state_values(w, -1, from->rows, group->rows);
        unlike(w, KVP_E_LAYOUT_OPAQUE, group, NULL, "rows");
    }
    if (from->cp_size * group->cp_size > KVP_MAX_CLASS_PAIRS) {
        state_values(w, -1, from->cp_size, group->cp_size);
        unlike(w, KVP_E_ROW_MISMATCH, group, NULL, "cp_size");
    }
}

/* ---- cuts: pieces of the lane axis, each with its candidates and its needy ranks ---- */

typedef struct { uint64_t lo, hi; size_t rank; uint64_t cp_rank; } Interval;
typedef struct { size_t cut; uint64_t cp_rank; size_t rank; } Cover;

static const Share *share_of(const Rank *rank, const Group *group) { /* they ascend by group; NULL where it has none */
    size_t lo = 0, hi = rank->count;
    while (lo < hi) {
        size_t middle = (lo + hi) / 2;
        if (rank->shares[middle].id < group->id) lo = middle + 1;
        else hi = middle;
    }
    return lo < rank->count && rank->shares[lo].id == group->id ? &rank->shares[lo] : NULL;
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
static void intervals_of(Work *w, Text *found, const Side *side, const Group *group, size_t first, Ranks ranks, const Share *family, size_t family_part) {
    for (size_t i = 0; i < ranks.count; i++) {
        const Share *share = share_of(&side->ranks[ranks.ranks[i]], group);
        if (family && order_of_spans(family, family_part, share, first)) continue;
        for (size_t j = 0; j < share->count; j++) {
            const Span *span = &share->spans[j];
            const Part *part = &group->parts[span->part];
            if (part->first != first) continue;
            if (part->whole == part->bytes) {
                add(w, found, &(Interval){span->lo * part->whole, span->hi * part->whole, ranks.ranks[i], share->cp_rank}, sizeof(Interval));
                continue;
            }
            for (uint64_t lane = span->lo; lane < span->hi; lane++) {
                uint64_t begin = lane * part->whole + part->at;
                add(w, found, &(Interval){begin, begin + part->bytes, ranks.ranks[i], share->cp_rank}, sizeof(Interval));
            }
        }
    }
}
static int by_cover(const void *a, const void *b, const void *context) {
    const Cover *x = a, *y = b;
    (void)context;
    if (x->cut != y->cut) return x->cut > y->cut ? 1 : -1;
    if (x->cp_rank != y->cp_rank) return x->cp_rank > y->cp_rank ? 1 : -1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}
static size_t cut_at(const uint64_t *cuts, size_t count, uint64_t byte) {
    size_t lo = 0, hi = count;
    while (lo < hi) {
        size_t middle = (lo + hi) / 2;
        if (cuts[middle] < byte) lo = middle + 1;
        else hi = middle;
    }
    return lo;
}
/* Which ranks of which class have each piece: intervals become covers, sorted. */
static void cover(Work *w, Text *covers, const Text *intervals, const uint64_t *cuts, size_t count) {
    const Interval *each = (const Interval *)intervals->text;
    for (size_t i = 0; i < intervals->size / sizeof *each; i++)
        for (size_t cut = cut_at(cuts, count, each[i].lo); cuts[cut] < each[i].hi; cut++) add(w, covers, &(Cover){cut, each[i].cp_rank, each[i].rank}, sizeof(Cover));
    sort(w, covers->text, covers->size / sizeof(Cover), sizeof(Cover), by_cover, NULL);
}
static Ranks ranks_at(Work *w, const Text *covers, size_t cut, uint64_t cp_rank) {
    const Cover *each = (const Cover *)covers->text;
    size_t lo = 0, hi = covers->size / sizeof *each, count = hi;
    while (lo < hi) {
        size_t middle = (lo + hi) / 2;
        if (each[middle].cut < cut || (each[middle].cut == cut && each[middle].cp_rank < cp_rank)) lo = middle + 1;
        else hi = middle;
    }
    size_t last = lo;
    while (last < count && each[last].cut == cut && each[last].cp_rank == cp_rank) last++;
    size_t *ranks = room_for(w, last - lo, sizeof *ranks);
    for (size_t i = lo; i < last; i++) ranks[i - lo] = each[i].rank;
    return (Ranks){ranks, last - lo};
}

static bool same_ranks(const Owned *a, const Owned *b) { return a->count == b->count && !memcmp(a->ranks, b->ranks, a->count * sizeof *a->ranks); }
typedef struct { const Group *from; const Owned *source, *sink; } Layer; /* a layer of a part of a sink group, and what it is read from */
static bool one_set(const Layer *a, const Layer *b) { return a->from == b->from && same_ranks(a->source, b->source) && same_ranks(a->sink, b->sink); }

/* The intervals of the layers of one set, of one family of it where the part is encoded, and where they begin and end. */
static uint64_t *bounds_of(Work *w, Planner *plan, const Group *group, size_t p, const Layer *layers, const Share *family, size_t *kept) {
    const Part *part = &group->parts[p], *other = part_named(layers->from, &part->name);
    size_t q = (size_t)(other - layers->from->parts), count = 0;
    for (int i = 0; i < 2; i++) plan->intervals[i].size = 0;
    intervals_of(w, &plan->intervals[0], plan->source, layers->from, q, (Ranks){layers->source->ranks, layers->source->count}, family, p);
    intervals_of(w, &plan->intervals[1], plan->sink, group, p, (Ranks){layers->sink->ranks, layers->sink->count}, family, p);
    uint64_t *cuts = room_for(w, 2 * (plan->intervals[0].size + plan->intervals[1].size) / sizeof(Interval), sizeof *cuts);
    for (int i = 0; i < 2; i++)
        for (size_t n = 0; n < plan->intervals[i].size / sizeof(Interval); n++) {
            cuts[count++] = ((const Interval *)plan->intervals[i].text)[n].lo;
            cuts[count++] = ((const Interval *)plan->intervals[i].text)[n].hi;
        }
    sort(w, cuts, count, sizeof *cuts, by_number, NULL);
    *kept = 1;
    for (size_t i = 1; i < count; i++)
        if (cuts[i] != cuts[*kept - 1]) cuts[(*kept)++] = cuts[i];
    return cuts;
}
typedef void Cutting(Work *, Planner *, const Group *, size_t, const Layer *, size_t, const Share *);
/* KVP-PLAN-SIZE: what the layers of a set come to. */
static void count_pieces(Work *w, Planner *plan, const Group *group, size_t p, const Layer *layers, size_t count, const Share *family) {
    const Part *part = &group->parts[p], *other = part_named(layers->from, &part->name);
    const Classes *classes = classes_known(w, plan, layers->from, group, part);
    uint64_t lane = part->whole == other->whole ? 0 : part->whole < other->whole ? part->whole : other->whole, set = 0;
    size_t kept;
    const uint64_t *cuts = bounds_of(w, plan, group, p, layers, family, &kept);
    if (family && !plan->intervals[0].size) unlike(w, KVP_E_LAYOUT_OPAQUE, group, part, NULL);
    for (size_t i = 0; i < count; i++) set += one_set(layers, &layers[i]);
    for (int i = 0; i < 2; i++)
        for (size_t n = 0; n < plan->intervals[i].size / sizeof(Interval) && plan->counted <= KVP_MAX_PIECES; n++) {
            const Interval *each = &((const Interval *)plan->intervals[i].text)[n];
            uint64_t number = cut_at(cuts, kept, each->hi) - cut_at(cuts, kept, each->lo) + (lane ? (each->hi - 1) / lane - each->lo / lane + 1 : 0);
            plan->counted += number * set * classes->met[i][each->cp_rank];
        }
}
/* One piece for all consecutive layers of a set, if it is read in all of them from the same ranks; units, which are dealt layer by layer, need one each. */
static void spread_layers(Work *w, Planner *plan, const Layer *layers, size_t count) {
    Piece *cut = (Piece *)plan->cut.text;
    size_t pieces = plan->cut.size / sizeof *cut;
    bool even = true;
    for (size_t n = 0; n < pieces; n++) even = even && (plan->spread_one || cut[n].needy.count >= cut[n].candidates.count);
    for (size_t i = 0, next; i < count; i = next) {
        next = i + 1;
        if (!one_set(layers, &layers[i])) continue;
        while (even && next < count && layers[next].sink->layer == layers[next - 1].sink->layer + 1 && one_set(layers, &layers[next])) next++;
        for (size_t n = 0; n < pieces; n++) {
            cut[n].layer = layers[i].sink->layer;
            cut[n].layers = layers[next - 1].sink->layer + 1;
            add(w, &plan->pieces, &cut[n], sizeof *cut);
        }
    }
}
/* The pieces of the layers of a set. */
static void cut(Work *w, Planner *plan, const Group *group, size_t p, const Layer *layers, size_t count, const Share *family) {
    const Part *part = &group->parts[p];
    const Classes *classes = classes_known(w, plan, layers->from, group, part);
    size_t kept;
    const uint64_t *cuts = bounds_of(w, plan, group, p, layers, family, &kept);
    for (int i = 0; i < 2; i++) {
        plan->covers[i].size = 0;
        cover(w, &plan->covers[i], &plan->intervals[i], cuts, kept);
    }
    plan->cut.size = 0;
    const Cover *sink = (const Cover *)plan->covers[1].text;
    const size_t covers = plan->covers[1].size / sizeof *sink;
    for (size_t n = 0, same; n < covers; n += same) {
        Piece piece = {.group = group, .part = p, .lo = cuts[sink[n].cut], .hi = cuts[sink[n].cut + 1], .needy = ranks_at(w, &plan->covers[1], sink[n].cut, sink[n].cp_rank)};
        for (same = 1; n + same < covers && sink[n + same].cut == sink[n].cut && sink[n + same].cp_rank == sink[n].cp_rank; same++) {}
        for (size_t i = 0; i < classes->met[1][sink[n].cp_rank]; i++) {
            piece.classes = classes->pairs[classes->first[sink[n].cp_rank] + i];
            piece.candidates = ranks_at(w, &plan->covers[0], sink[n].cut, piece.classes.source);
            if (!piece.candidates.count) unlike(w, KVP_E_COVERAGE, group, part, NULL);
            add(w, &plan->cut, &piece, sizeof piece);
        }
    }
    spread_layers(w, plan, layers, count);
}
static void each_family(Work *w, Cutting *made, Planner *plan, const Group *group, size_t p, const Layer *layers, size_t count) {
    if (!group->parts[p].encoding.kind) {
        made(w, plan, group, p, layers, count, NULL);
        return;
    }
    const Share *before = NULL;
    for (;;) { /* each time the least of those that come after the one before */
        const Share *next = NULL;
        for (size_t i = 0; i < layers->sink->count; i++) {
            const Share *share = share_of(&plan->sink->ranks[layers->sink->ranks[i]], group);
            if ((!before || order_of_spans(share, p, before, p) > 0) && (!next || order_of_spans(share, p, next, p) < 0)) next = share;
        }
        if (!next) return;
        made(w, plan, group, p, layers, count, next);
        before = next;
    }
}
static bool is_cold(const Planner *plan, uint64_t model) {
    if (!plan->cold_draft || !model) return false;
    for (size_t i = 0; i < plan->source->group_count; i++)
        if (plan->source->groups[i].model == model && plan->source->groups[i].layers) return false;
    return true;
}
static const Owned *owned_of(const Group *group, uint64_t layer) { /* which somebody owns */
    size_t lo = 0, hi = group->layers;
    while (lo < hi) {
        size_t middle = (lo + hi) / 2;
        if (group->owned[middle].layer < layer) lo = middle + 1;
        else hi = middle;
    }
    return &group->owned[lo];
}
static void pair_part(Work *w, Planner *plan, const Group *group, size_t p) {
    const Part *part = &group->parts[p];
    size_t word = word_of(plan->source, &part->name);
    bool there = false;
    for (size_t i = 0; i < plan->source->group_count; i++) {
        const Group *from = &plan->source->groups[i];
        there |= from->model == group->model && from->layers && part_named(from, &part->name);
    }
    Layer *layers = get(w, group->layers, sizeof *layers);
    for (size_t i = 0; i < group->layers; i++) {
        const Claim *claim = claim_of(plan->source, group->model, word, group->owned[i].layer);
        if (claim->group) layers[i] = (Layer){claim->group, owned_of(claim->group, claim->layer), &group->owned[i]};
    }
    bool *seen = get(w, group->layers, sizeof *seen);
    for (size_t i = 0; i < group->layers; i++) {
        if (!there) unlike(w, KVP_E_PART_MISSING, group, part, NULL);
        if (!layers[i].from) unlike(w, KVP_E_LAYER_MISSING, group, part, NULL);
        compare_groups(w, layers[i].from, group, part);
        classes_known(w, plan, layers[i].from, group, part);
        for (size_t j = 0; j < i && !seen[i]; j++) seen[i] = one_set(&layers[j], &layers[i]);
        if (!seen[i]) each_family(w, count_pieces, plan, group, p, layers + i, group->layers - i);
    }
    if (plan->counted > KVP_MAX_PIECES) unlike(w, KVP_E_TOO_LARGE, group, part, NULL);
    for (size_t i = 0; i < group->layers; i++)
        if (!seen[i]) each_family(w, cut, plan, group, p, layers + i, group->layers - i);
}
static bool is_optional(const kvp_value *name) {
    const Registered *row = registered(name);
    return row && row->optional;
}
static bool may_be_left(const Planner *plan, const kvp_value *name) {
    if (is_optional(name)) return true;
    const kvp_value *without = &plan->sink->without;
    for (size_t i = 0; without->kind && i < without->count; i++)
        if (!compare(&without->items[i], name)) return true;
    return false;
}
static void check_left(Work *w, const Planner *plan, const Group *group, const Part *part) {
    if (group->kind == HANDOFF || is_optional(&part->name)) return;
    for (size_t word = 0; word < plan->source->word_count; word++) {
        const kvp_value *name = &plan->source->words[word];
        if (may_be_left(plan, name)) continue;
        size_t taken = word_of(plan->sink, name);
        for (size_t n = 0; n < group->layers; n++) {
            const Group *there = claim_of(plan->source, group->model, word, group->owned[n].layer)->group;
            if (there && there->kind != HANDOFF && !claim_of(plan->sink, group->model, taken, group->owned[n].layer)->group) unlike(w, KVP_E_PART_MISSING, group, part, NULL);
        }
    }
}
