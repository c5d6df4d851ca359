/* The deal of tokens over ranks (dcp.md), and windows of rows: what they need, and where they begin late (transfers.md, resume.md). */

struct kvp_deal { Arena arena; Group group; };
typedef struct { bool owned; uint64_t cp_rank, row; } Place;

static Place place_of(const Group *group, uint64_t token) {
    if (group->cp_size == 1) return (Place){true, 0, token / group->tokens};
    if (token < group->origin) return (Place){false, 0, 0};
    uint64_t from = token - group->origin, run = group->interleave, i = from / run % turns(group), before = 0, times = !group->order.kind;
    for (uint64_t n = 0; group->order.kind && n < group->order.count; n++)
        if (turn(group, n) == turn(group, i)) {
            times++;
            before += n < i;
        }
    return (Place){true, turn(group, i), ((from / (run * turns(group)) * times + before) * run + from % run) / group->tokens};
}
static uint64_t rows_below(const Group *group, uint64_t cp_rank, uint64_t token) {
    if (group->cp_size == 1) return token / group->tokens;
    uint64_t run = group->interleave, period = run * turns(group), all = 0, from = token > group->origin ? token - group->origin : 0;
    bool listed = group->order.kind;
    for (uint64_t i = listed ? 0 : cp_rank; i < (listed ? turns(group) : cp_rank + 1); i++) {
        if (turn(group, i) != cp_rank) continue;
        uint64_t more = from % period > i * run ? from % period - i * run : 0;
        all += from / period * run + (more < run ? more : run);
    }
    return all / group->tokens;
}
static uint64_t global_row(const Group *group, uint64_t cp_rank, uint64_t row) { /* of a local one */
    if (group->cp_size == 1) return row;
    uint64_t token = row * group->tokens, times = 0, run = group->interleave;
    for (uint64_t i = 0; i < turns(group); i++) times += turn(group, i) == cp_rank;
    uint64_t place = token % (times * run) / run, i = 0;
    for (;; i++)
        if (turn(group, i) == cp_rank && !place--) break;
    return (group->origin + token / (times * run) * run * turns(group) + i * run + token % run) / group->tokens;
}
static void rows_of(const Group *group, uint64_t first, uint64_t count, uint64_t *begin, uint64_t *end) {
    uint64_t s = group->tokens, last = first + count;
    *begin = first / s + (!group->partial && first % s);
    *end = last / s + (group->partial && last % s);
    if (!count || *end < *begin) *end = *begin;
}
static uint64_t items_needed(const Group *group, uint64_t cp_rank, uint64_t first, uint64_t count) {
    uint64_t begin, end;
    if (group->kind != PAGE) return group->kind != HANDOFF;
    rows_of(group, first, count, &begin, &end);
    uint64_t lo = rows_below(group, cp_rank, begin * group->tokens), hi = rows_below(group, cp_rank, end * group->tokens);
    return hi > lo ? (hi - 1) / group->rows - lo / group->rows + 1 : 0;
}

/* ---- windows that begin late ---- */

static uint64_t greatest_divisor(uint64_t a, uint64_t b) {
    for (uint64_t rest; b; b = rest) {
        rest = a % b;
        a = b;
    }
    return a;
}
static uint64_t begins_at(const Group *group, uint64_t since) { /* rounded up to where a row begins, or a turn and an item of every cp rank */
    uint64_t from = 0, step = group->tokens;
    if (group->opaque && group->kind == PAGE && group->cp_size == 1) step *= group->rows;
    else if (group->opaque && group->kind == PAGE) {
        uint64_t times = 1;
        for (uint64_t cp_rank = 0; cp_rank < group->cp_size; cp_rank++) {
            uint64_t rows_a_turn = 0;
            for (uint64_t i = 0; i < turns(group); i++) rows_a_turn += turn(group, i) == cp_rank ? group->interleave / group->tokens : 0;
            uint64_t mine = group->rows / greatest_divisor(group->rows, rows_a_turn);
            times = times / greatest_divisor(times, mine) * mine;
        }
        from = group->origin;
        step = times * group->interleave * turns(group);
    }
    if (since <= from) return from;
    uint64_t rest = step ? (since - from) % step : 0, more = rest ? step - rest : 0;
    return more > UINT64_MAX - since ? UINT64_MAX : since + more;
}
static bool inside_item(const Group *group, uint64_t cp_rank, uint64_t first, uint64_t count) { /* where a window of whole items must not begin */
    uint64_t rows[2];
    rows_of(group, first, count, &rows[0], &rows[1]);
    const uint64_t begin = rows_below(group, cp_rank, rows[0] * group->tokens);
    return group->opaque && group->kind == PAGE && begin % group->rows && begin < rows_below(group, cp_rank, rows[1] * group->tokens);
}
/* A window cut to the tokens that the source holds from a number on, and its items to those that are left; false where it begins below the number and is not late. */
static bool cut_late(const Group *group, uint64_t cp_rank, uint64_t since, bool late, kvp_window *window) {
    uint64_t end = window->first + window->count, before[2], after[2], held = since ? begins_at(group, since) : 0;
    if (held <= window->first || !window->count || group->kind == SLOT || group->kind == HANDOFF) return true;
    if (!late) return false;
    rows_of(group, window->first, window->count, &before[0], &before[1]);
    window->first = held < end ? held : end;
    window->count = end - window->first;
    rows_of(group, window->first, window->count, &after[0], &after[1]);
    uint64_t skipped = rows_below(group, cp_rank, after[0] * group->tokens), all = rows_below(group, cp_rank, after[1] * group->tokens);
    uint64_t gone = skipped / group->rows - rows_below(group, cp_rank, before[0] * group->tokens) / group->rows;
    if (skipped >= all) gone = window->item_count;
    if (group->kind == PAGE && gone <= window->item_count) {
        window->items += gone;
        window->item_count -= gone;
    }
    return true;
}

/* ---- the handle ---- */

typedef struct { const kvp_value *group; kvp_deal *made; } Dealt;
static void make_deal(Work *w, void *arguments) {
    Dealt *dealt = arguments;
    kvp_deal *deal = get(w, 1, sizeof *deal);
    deal->group = group_of(w, dealt->group);
    check_deal(w, &deal->group, 0);
    deal->arena = w->arena;
    dealt->made = deal;
}
int kvp_deal_new(const kvp_value *group, const kvp_options *options, kvp_deal **deal, kvp_error *error) {
    Work w;
    Dealt dealt = {group, NULL};
    int code = group && group->kind == MAP && group->layout == KVP_GROUP ? attempt(&w, options, error, make_deal, &dealt) : misused(error);
    *deal = dealt.made;
    return code;
}
void kvp_deal_free(kvp_deal *deal) {
    if (deal) release(&deal->arena);
}
bool kvp_deal_owner(const kvp_deal *deal, uint64_t token, uint64_t *cp_rank, uint64_t *row) {
    Place place = place_of(&deal->group, token);
    *cp_rank = place.cp_rank;
    *row = place.row;
    return place.owned;
}
uint64_t kvp_deal_rows(const kvp_deal *deal, uint64_t cp_rank, uint64_t token) { return cp_rank < deal->group.cp_size ? rows_below(&deal->group, cp_rank, token) : 0; }
uint64_t kvp_deal_items(const kvp_deal *deal, uint64_t cp_rank, uint64_t first, uint64_t count) { return cp_rank < deal->group.cp_size ? items_needed(&deal->group, cp_rank, first, count) : 0; }
typedef struct { const Group *group; uint64_t cp_rank, since; const kvp_value *grants; kvp_window *window; } Late;
static void serve_late(Work *w, void *arguments) {
    Late *late = arguments;
    const Group *group = late->group;
    const kvp_value *f = late->grants->items;
    kvp_window *window = late->window;
    *window = (kvp_window){f[Grants_first].number, f[Grants_count].number, f[Grants_items].numbers, f[Grants_items].count};
    const Path first = {&(Path){&(Path){NULL, "grants", 0}, NULL, 0}, "first", 0};
    if (window->count && window->first % group->tokens && (group->kind == PAGE || group->kind == RING)) refuse(w, KVP_E_BAD_GRANT, &first);
    if (inside_item(group, late->cp_rank, window->first, window->count)) refuse(w, KVP_E_BAD_GRANT, &first);
    if (!cut_late(group, late->cp_rank, late->since, f[Grants_late].number, window)) refuse(w, KVP_E_NOT_HELD, &first);
}
int kvp_deal_late(const kvp_deal *deal, uint64_t cp_rank, uint64_t since, const kvp_value *grants, kvp_window *window, kvp_error *error) {
    Work w;
    Late late = {&deal->group, cp_rank, since, grants, window};
    if (!grants || grants->kind != MAP || grants->layout != KVP_GRANTS || cp_rank >= deal->group.cp_size) return misused(error);
    int code = attempt(&w, NULL, error, serve_late, &late);
    if (!code) release(&w.arena);
    return code;
}
