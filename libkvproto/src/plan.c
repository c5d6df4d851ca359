/* Plans: which candidate each needy rank reads from, boxes joined and sorted, and their digests (planning.md, steps 4 and 5). */

static int by_list(Ranks a, Ranks b) {
    for (size_t i = 0; i < a.count && i < b.count; i++)
        if (a.ranks[i] != b.ranks[i]) return a.ranks[i] > b.ranks[i] ? 1 : -1;
    return (a.count > b.count) - (a.count < b.count);
}
static int by_candidates(const Piece *a, const Piece *b) { /* in ascending order of their sizes, of equal ones as lists */
    return a->candidates.count != b->candidates.count ? (a->candidates.count > b->candidates.count ? 1 : -1) : by_list(a->candidates, b->candidates);
}
static int by_entry(const Piece *a, const Piece *b) {
    if (a->group->id != b->group->id) return a->group->id > b->group->id ? 1 : -1;
    if (a->layer != b->layer) return a->layer > b->layer ? 1 : -1;
    return by_list(a->needy, b->needy);
}
static int by_place(const void *a, const void *b, const void *context) {
    const Piece *x = a, *y = b;
    bool few = x->needy.count < x->candidates.count, less = y->needy.count < y->candidates.count;
    (void)context;
    if (few != less) return few ? 1 : -1; /* those of m >= c come first */
    int order = few ? by_candidates(x, y) : 0;
    return order || !few ? order : by_entry(x, y);
}
static void read_from(Work *w, Planner *plan, const Piece *piece, size_t needy, size_t source) {
    const Group *group = piece->group;
    kvp_box box = {plan->source->ranks[source].rank, plan->sink->ranks[piece->needy.ranks[needy]].rank, group->id, group->model, piece->layer, piece->layers,
        piece->part, piece->lo, piece->hi, piece->classes.source, piece->classes.sink, plan->sink->replica};
    add(w, &plan->rows, &box, sizeof box);
}
typedef struct { size_t from, count; uint64_t needy, j; } Run; /* units of one needy rank, the j-th, from a place in the sorted list on */
static int by_length(const void *a, const void *b, const void *context) {
    const Run *x = a, *y = b;
    (void)context;
    return x->count != y->count ? (x->count < y->count ? 1 : -1) : (x->from > y->from) - (x->from < y->from);
}
/* FEW_SOURCES: of the units of candidates S, {needy rank, unit} sorted, the place in S from which each is read. */
static void place_runs(Work *w, const Planner *plan, Ranks s, uint64_t (*units)[2], size_t n, bool *awaited, size_t *chosen) {
    uint64_t most = 2 * ((n + s.count - 1) / s.count), j = 0, m = 0, *load = get(w, s.count, sizeof *load);
    Run *runs = room_for(w, n, sizeof *runs);
    size_t count = 0;
    for (size_t from = 0, x; from < n; from += x, m++) {
        for (x = 1; from + x < n && units[from + x][0] == units[from][0]; x++) {}
        uint64_t a = (x + most - 1) / most;
        for (size_t i = 0; i < x; i++) {
            if (!i || i * a / x != (i - 1) * a / x) runs[count++] = (Run){from + i, 0, units[from][0], m};
            runs[count - 1].count++;
        }
    }
    sort(w, runs, count, sizeof *runs, by_length, NULL);
    for (size_t r = 0; r < count; r++) {
        const Run *run = &runs[r];
        bool *mine = &awaited[run->needy * plan->source->rank_count];
        size_t best[2] = {s.count, s.count}; /* of those that it awaits already and that have room; of all */
        j = run->j * s.count / m + plan->sink->replica;
        for (size_t i = 0; i < s.count; i++) {
            size_t k = (size_t)((j + i) % s.count);
            bool again = mine[s.ranks[k]] && load[k] + run->count <= most;
            if (again && (best[0] == s.count || load[k] < load[best[0]])) best[0] = k;
            if (best[1] == s.count || load[k] < load[best[1]]) best[1] = k;
        }
        size_t taken = best[0] < s.count ? best[0] : best[1];
        load[taken] += run->count;
        mine[s.ranks[taken]] = true;
        for (size_t i = 0; i < run->count; i++) chosen[units[run->from + i][1]] = taken;
    }
}
/* Pieces that have the same candidates, and fewer needy ranks than these. */
static void deal_units(Work *w, Planner *plan, Piece *first, size_t count, bool *awaited) {
    uint64_t n = 0, u = 0;
    for (size_t i = 0; i < count; i++) {
        if (i && !by_entry(&first[i - 1], &first[i])) first[i].first_unit = first[i - 1].first_unit;
        else {
            first[i].first_unit = n;
            n += first[i].needy.count;
        }
    }
    Ranks s = first->candidates;
    size_t *chosen = room_for(w, n, sizeof *chosen);
    uint64_t(*units)[2] = room_for(w, n, sizeof *units);
    for (size_t i = 0; i < count; i++)
        for (size_t j = first[i].first_unit < u ? first[i].needy.count : 0; j < first[i].needy.count; j++, u++) {
            units[u][0] = first[i].needy.ranks[j];
            units[u][1] = u;
            chosen[u] = (size_t)((u + plan->sink->replica) % s.count);
        }
    if (plan->few_sources) {
        sort(w, units, n, sizeof *units, by_owner, NULL);
        place_runs(w, plan, s, units, n, awaited, chosen);
    }
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < first[i].needy.count; j++) read_from(w, plan, &first[i], j, s.ranks[chosen[first[i].first_unit + j]]);
}
static void elect(Work *w, Planner *plan) {
    Piece *each = (Piece *)plan->pieces.text;
    size_t count = plan->pieces.size / sizeof *each, same_candidates;
    bool *awaited = plan->few_sources ? get(w, plan->sink->rank_count * plan->source->rank_count, sizeof *awaited) : NULL;
    sort(w, each, count, sizeof *each, by_place, NULL);
    for (size_t i = 0; i < count; i += same_candidates) {
        uint64_t c = each[i].candidates.count, m = each[i].needy.count;
        same_candidates = 1;
        if (m < c && !plan->spread_one) {
            while (i + same_candidates < count && !by_candidates(&each[i], &each[i + same_candidates])) same_candidates++;
            deal_units(w, plan, &each[i], same_candidates, awaited);
            continue;
        }
        for (size_t j = 0; j < m; j++) {
            size_t source = each[i].candidates.ranks[j * c / m];
            if (awaited) awaited[each[i].needy.ranks[j] * plan->source->rank_count + source] = true;
            read_from(w, plan, &each[i], j, source);
        }
    }
}

/* ---- rows: joined, sorted, digested ---- */

enum { ROW = 12 };
typedef struct { int count, columns[ROW]; } Columns; /* how many count, and which */
static int by_columns(const void *a, const void *b, const void *context) {
    const uint64_t *x = a, *y = b;
    const Columns *by = context;
    for (int i = 0; i < by->count; i++)
        if (x[by->columns[i]] != y[by->columns[i]]) return x[by->columns[i]] > y[by->columns[i]] ? 1 : -1;
    return 0;
}
/* Sorted by some columns, rows become one where they are alike in all but the last of these, and the one begins there where the other ends. */
static size_t joined(Work *w, uint64_t (*row)[ROW], size_t count, Columns by, int begin, int end) {
    size_t kept = 0;
    sort(w, row, count, sizeof *row, by_columns, &by);
    by.count--;
    for (size_t i = 0; i < count; i++) {
        if (kept && row[kept - 1][end] == row[i][begin] && !by_columns(row[kept - 1], row[i], &by)) row[kept - 1][end] = row[i][end];
        else memmove(row[kept++], row[i], sizeof *row);
    }
    return kept;
}
static uint64_t (*join(Work *w, Planner *plan, size_t *count))[ROW] {
    uint64_t(*row)[ROW] = (uint64_t(*)[ROW])plan->rows.text;
    *count = joined(w, row, plan->rows.size / sizeof *row, (Columns){9, {0, 1, 2, 6, 9, 10, 4, 5, 7}}, 7, 8);
    *count = joined(w, row, *count, (Columns){9, {0, 1, 2, 6, 9, 10, 7, 8, 4}}, 4, 5);
    sort(w, row, *count, sizeof *row, by_columns, &(Columns){ROW, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}});
    return row;
}
static uint64_t (*plan_rows(Work *w, Planner *plan, size_t *count))[ROW] {
    compare_facts(w, plan->source, plan->sink);
    for (int left = 0; left < 2; left++)
        for (size_t i = 0; i < plan->sink->group_count; i++) {
            const Group *group = &plan->sink->groups[i];
            for (size_t p = 0; p < group->count; p++) {
                if (group->parts[p].first != p || is_cold(plan, group->model)) continue;
                if (left) check_left(w, plan, group, &group->parts[p]);
                else pair_part(w, plan, group, p);
            }
        }
    elect(w, plan);
    return join(w, plan, count);
}
static void digest_rows(const uint64_t (*row)[ROW], size_t count, uint8_t digest[32]) {
    Sha256 sha = sha256_new();
    for (size_t i = 0; i < count; i++) {
        uint8_t bytes[8 * ROW];
        for (int k = 0; k < ROW; k++)
            for (int b = 0; b < 8; b++) bytes[8 * k + b] = (uint8_t)(row[i][k] >> 8 * b);
        sha256_add(&sha, bytes, sizeof bytes);
    }
    sha256_end(&sha, digest);
}

/* ---- the handle ---- */

struct kvp_plan {
    Arena arena;
    kvp_box *boxes;
    kvp_route *routes;
    size_t box_count, route_count, awaited_count, cold_count;
    uint64_t *sinks, *sources, *cold; /* sinks and sources: of pairs that have a route, ascending */
    uint8_t digest[32];
};
static void keep_routes(kvp_plan *plan, const uint64_t (*row)[ROW], kvp_route *routes) { /* with room for as many as there are boxes, or NULL to count them */
    plan->route_count = 0;
    for (size_t i = 0, n; i < plan->box_count; i += n, plan->route_count++) {
        for (n = 1; i + n < plan->box_count && !memcmp(row[i], row[i + n], 3 * sizeof(uint64_t)); n++) {}
        if (!routes) continue;
        kvp_route *route = &routes[plan->route_count];
        *route = (kvp_route){.source = row[i][0], .sink = row[i][1], .group = row[i][2], .boxes = plan->boxes + i, .count = n};
        digest_rows(row + i, n, route->digest);
    }
}
static void keep_awaited(Work *w, kvp_plan *plan, uint64_t (*pairs)[2]) {
    size_t count = 0;
    for (size_t i = 0; i < plan->route_count; i++) {
        if (i && plan->routes[i].source == plan->routes[i - 1].source && plan->routes[i].sink == plan->routes[i - 1].sink) continue;
        pairs[count][0] = plan->routes[i].sink;
        pairs[count++][1] = plan->routes[i].source;
    }
    sort(w, pairs, count, sizeof *pairs, by_owner, NULL);
    for (size_t i = 0; i < count; i++) {
        plan->sinks[i] = pairs[i][0];
        plan->sources[i] = pairs[i][1];
    }
    plan->awaited_count = count;
}
static void keep_cold(const Planner *of, kvp_plan *plan) {
    for (size_t i = 0; i < of->sink->group_count; i++) {
        uint64_t model = of->sink->groups[i].model;
        bool again = !of->sink->groups[i].layers;
        for (size_t j = 0; j < i; j++) again |= of->sink->groups[j].model == model && of->sink->groups[j].layers;
        if (!again && is_cold(of, model)) plan->cold[plan->cold_count++] = model;
    }
}
static void *taken_of(Work *w, Arena *arena, size_t count, size_t size) {
    void *found = take_memory(arena, count * size);
    if (!found) refuse(w, KVP_NO_MEMORY, NULL);
    return found;
}
typedef struct { const Side *source, *sink; uint64_t features; kvp_plan *made; Arena arena; } Planned; /* arena: of the plan alone, without what was only needed to make it */
static void make_plan(Work *w, void *arguments) {
    Planned *planned = arguments;
    Arena *arena = &planned->arena;
    Planner of = {.source = planned->source, .sink = planned->sink, .spread_one = planned->features & KVP_FEATURE_BIT(KVP_FEATURE_SPREAD_ONE),
        .cold_draft = planned->features & KVP_FEATURE_BIT(KVP_FEATURE_COLD_DRAFT), .few_sources = planned->features & KVP_FEATURE_BIT(KVP_FEATURE_FEW_SOURCES)};
    size_t count;
    const uint64_t(*row)[ROW] = (const uint64_t(*)[ROW])plan_rows(w, &of, &count);
    kvp_plan *plan = taken_of(w, arena, 1, sizeof *plan);
    *plan = (kvp_plan){.boxes = taken_of(w, arena, count, sizeof(kvp_box)), .box_count = count};
    if (count) memcpy(plan->boxes, row, count * sizeof *row);
    digest_rows(row, count, plan->digest);
    keep_routes(plan, row, NULL);
    plan->routes = taken_of(w, arena, plan->route_count, sizeof(kvp_route));
    keep_routes(plan, row, plan->routes);
    plan->sinks = taken_of(w, arena, plan->route_count, sizeof *plan->sinks);
    plan->sources = taken_of(w, arena, plan->route_count, sizeof *plan->sources);
    plan->cold = taken_of(w, arena, of.sink->group_count, sizeof *plan->cold);
    keep_awaited(w, plan, room_for(w, plan->route_count, 2 * sizeof(uint64_t)));
    keep_cold(&of, plan);
    plan->arena = *arena;
    planned->made = plan;
}
int kvp_plan_new(const kvp_description *source, const kvp_description *sink, uint64_t features, const kvp_options *options, kvp_plan **plan, kvp_error *error) {
    Work w;
    Planned planned = {.source = source, .sink = sink, .features = features, .arena = {.options = options_of(options)}};
    int code = attempt(&w, options, error, make_plan, &planned);
    if (code) release(&planned.arena);
    else release(&w.arena);
    *plan = planned.made;
    return code;
}
const uint8_t *kvp_plan_digest(const kvp_plan *plan) { return plan->digest; }
const kvp_box *kvp_plan_boxes(const kvp_plan *plan, size_t *count) {
    *count = plan->box_count;
    return plan->boxes;
}
const kvp_route *kvp_plan_routes(const kvp_plan *plan, size_t *count) {
    *count = plan->route_count;
    return plan->routes;
}
const uint64_t *kvp_plan_required(const kvp_plan *plan, uint64_t sink_rank, size_t *count) {
    size_t first = cut_at(plan->sinks, plan->awaited_count, sink_rank), last = first;
    while (last < plan->awaited_count && plan->sinks[last] == sink_rank) last++;
    *count = last - first;
    return plan->sources + first;
}
const uint64_t *kvp_plan_cold(const kvp_plan *plan, size_t *count) {
    *count = plan->cold_count;
    return plan->cold;
}
void kvp_plan_free(kvp_plan *plan) {
    if (plan) release(&plan->arena);
}
