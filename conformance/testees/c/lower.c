/* What two engines agree on in kvproto, in C11, without a library, made from spec/v1 alone (lowering.md, transfers.md, registration.md, testee.md).
 * With the files that it includes, it is a testee of the conformance suite, role both, level L2, with checksums, packed streams and inline:
 *
 *     gcc -std=c11 -O2 -o lower lower.c && kvproto-conformance run -- ./lower
 *
 * sink.c includes this file and adds what a live engine does. In order: one side of a rank pair, rows, moves, windows that begin late, inline, the testee. */
#ifndef CLAIM
#define CLAIM "\"name\": \"lower.c\", \"version\": \"1\", \"language\": \"c\", \"role\": \"both\", \"level\": \"L2\", " \
    "\"extensions\": [\"json\", \"streams\", \"deals\", \"sections\", \"spread\", \"cold\", \"verify\", \"staged\", \"inline\", \"epochs\", \"intent\", \"pull\", \"catalogue\", \"storage\"]"
#endif
#include "plan.c"

/* ---- one side of a rank pair: where a byte of the lane axis lies ---- */

typedef struct { const Side *side; uint64_t rank; const Rank *mine; Node *columns, *windows; size_t column_count, window_count; } End;
typedef struct { const Group *group; const Share *share; const Node *columns, *window; uint64_t begin, end; } Window; /* rows of a group that one end names */

static Node *taken_list(int layout, const Json *list, size_t *count) {
    Node *found = get((list ? list->count : 0) * sizeof *found);
    *count = 0;
    for (const Json *each = list ? list->items : NULL; each; each = each->next) found[(*count)++] = taken_map(&LAYOUTS[layout], each, NULL);
    return found;
}
static End end_of(const Json *json) {
    End end = {.side = side_of(member(json, "geometry")), .rank = integer(member(json, "rank"), NULL)};
    end.columns = taken_list(L_Columns, member(json, "columns"), &end.column_count);
    end.windows = taken_list(L_Grants, member(json, "windows"), &end.window_count);
    for (size_t i = 0; i < end.side->rank_count; i++)
        if (end.side->ranks[i].rank == end.rank) end.mine = &end.side->ranks[i];
    return end;
}
static const Node *of_group(int layout, const Node *list, size_t count, uint64_t group) {
    for (size_t i = 0; i < count; i++)
        if (number(layout, &list[i], "group") == group) return &list[i];
    refuse("BAD_GRANT", NULL);
}
static void rows_of(const Group *group, const Node *grant, uint64_t *begin, uint64_t *end) {
    uint64_t first = number(L_Grants, grant, "first"), count = number(L_Grants, grant, "count"), s = group->tokens;
    *begin = group->partial ? first / s : (first + s - 1) / s;
    *end = (first + count + (group->partial ? s - 1 : 0)) / s;
    if (!count || *end < *begin) *end = *begin;
}
static Window window_of(const End *end, const Group *group) {
    if (!end->column_count) return (Window){.group = group, .end = UINT64_MAX}; /* the peer's, whose columns and items nobody here knows */
    Window window = {.group = group, .columns = of_group(L_Columns, end->columns, end->column_count, group->id),
        .window = of_group(L_Grants, end->windows, end->window_count, group->id), .share = end->mine->shares};
    while (window.share->group != group) window.share++;
    rows_of(group, window.window, &window.begin, &window.end);
    return window;
}
static uint64_t of_column(const Window *window, const char *name, size_t column) {
    Node list = field(L_Columns, window->columns, name);
    if (column >= list.count) refuse("BAD_COLUMNS", NULL);
    return list.numbers[column];
}
/* The place of a byte of a part's lane axis, in a row of an item; and how many bytes there follow it in its lane, or section of one. */
static uint64_t byte_at(const Window *window, size_t first, uint64_t layer, uint64_t item, uint64_t row, uint64_t byte, uint64_t *region, uint64_t *offset) {
    const Group *group = window->group;
    const Share *share = window->share;
    *region = *offset = 0;
    if (!share) return UINT64_MAX;
    uint64_t whole = group->parts[first].whole, lane = byte / whole, within_lane = byte % whole, before = 0;
    size_t part = first, column = 0;
    while (group->parts[part].first != first || within_lane < group->parts[part].at || within_lane >= group->parts[part].at + group->parts[part].bytes) part++;
    for (size_t i = 0; i < share->count; i++) {
        const Span *span = &share->spans[i];
        if (span->part != part) continue;
        if (lane >= span->lo && lane < span->hi) {
            before += lane - span->lo;
            break;
        }
        before += span->hi - span->lo;
    }
    while (share->layers.numbers[column] != layer) column++;
    column = column * group->count + part;
    *region = of_column(window, "region", column);
    *offset = of_column(window, "offset", column) + item * of_column(window, "item_stride", column) + row * of_column(window, "row_stride", column)
        + before * of_column(window, "lane_stride", column) + within_lane - group->parts[part].at;
    return group->parts[part].at + group->parts[part].bytes - within_lane;
}
static uint64_t item_of(const Window *window, uint64_t i) {
    if (!window->share) return 0;
    Node items = field(L_Grants, window->window, "items");
    if (i >= items.count) refuse("BAD_GRANT", NULL);
    return items.numbers[i];
}

/* ---- rows and moves ---- */

enum { MODEL, LAYER, PART, MAP, GLOBAL, BYTE, FROM, FROM_AT, TO, TO_AT, LENGTH, GROUP, MOVE }; /* numbers of a move */
typedef struct { const Group *source, *sink; Pair classes; } Map;
static Text moves, maps;

static uint64_t map_number(Map map) {
    const Map *known = (const Map *)maps.text;
    size_t count = maps.size / sizeof map, i = 0;
    while (i < count && (known[i].source != map.source || known[i].sink != map.sink || known[i].classes.source != map.classes.source || known[i].classes.sink != map.classes.sink)) i++;
    if (i == count) add(&maps, &map, sizeof map);
    return i;
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
static void move_row(const uint64_t *box, uint64_t layer, const Window *ends, const size_t *parts, const uint64_t *item, const uint64_t *row, uint64_t global, uint64_t map) {
    for (uint64_t byte = box[7], step; byte < box[8]; byte += step) {
        uint64_t move[MOVE] = {box[3], layer, box[6], map, global, byte, 0, 0, 0, 0, 0, box[2]};
        uint64_t from = byte_at(&ends[0], parts[0], layer, item[0], row[0], byte, &move[FROM], &move[FROM_AT]);
        uint64_t to = byte_at(&ends[1], parts[1], layer, item[1], row[1], byte, &move[TO], &move[TO_AT]);
        step = from < to ? from : to;
        if (step > box[8] - byte) step = box[8] - byte;
        move[LENGTH] = step;
        add(&moves, move, sizeof move);
    }
}
/* Item and row of a row of the window's rank: of a page by its local row, of a ring by its global one. */
static void place_in(const Window *window, uint64_t cp_rank, uint64_t local, uint64_t global, uint64_t *item, uint64_t *row) {
    const Group *group = window->group;
    uint64_t before = rows_below(group, cp_rank, window->begin * group->tokens) / group->rows;
    *item = item_of(window, group->kind == PAGE ? local / group->rows - before : 0);
    *row = (group->kind == PAGE ? local : global) % group->rows;
}
static void move_layer(const End *ends, const uint64_t *box, uint64_t layer) {
    const Group *group = NULL;
    for (size_t i = 0; i < ends[1].side->group_count; i++)
        if (ends[1].side->groups[i].id == box[2]) group = &ends[1].side->groups[i];
    if (group->kind == HANDOFF) return;
    const Part *part = &group->parts[box[6]];
    const Group *from = claim_of(ends[0].side, box[3], word_of(ends[0].side, &part->name), layer)->group;
    const Window window[2] = {window_of(&ends[0], from), window_of(&ends[1], group)};
    const size_t parts[2] = {(size_t)(part_named(from, &part->name) - from->parts), (size_t)box[6]};
    const uint64_t map = map_number((Map){from, group, {box[9], box[10]}});
    uint64_t item[2], row[2], begin = window[1].begin, end = window[1].end;
    if (group->kind == SLOT || (group->opaque && group->kind == RING)) { /* one item, rows from 0 */
        for (uint64_t i = 0; i < (group->opaque ? group->rows : group->live); i++) {
            item[0] = item_of(&window[0], 0);
            item[1] = item_of(&window[1], 0);
            row[0] = row[1] = i;
            move_row(box, layer, window, parts, item, row, i, map);
        }
        return;
    }
    if (group->opaque) { /* every item that holds a row of the window */
        uint64_t lo = rows_below(group, box[10], begin * group->tokens), hi = rows_below(group, box[10], end * group->tokens), size = group->rows;
        for (uint64_t i = lo / size * size; lo < hi && i < (hi + size - 1) / size * size; i++) {
            for (int e = 0; e < 2; e++) place_in(&window[e], box[9 + e], i, 0, &item[e], &row[e]);
            move_row(box, layer, window, parts, item, row, global_row(group, box[10], i), map);
        }
        return;
    }
    for (uint64_t i = begin; i < end; i++) {
        const Place place[2] = {place_of(from, i * from->tokens), place_of(group, i * group->tokens)};
        if (!place[0].owned || !place[1].owned || place[0].cp_rank != box[9] || place[1].cp_rank != box[10]) continue;
        if (i < window[0].begin || i >= window[0].end) refuse("NOT_HELD", NULL);
        for (int e = 0; e < 2; e++) place_in(&window[e], box[9 + e], place[e].row, i, &item[e], &row[e]);
        move_row(box, layer, window, parts, item, row, i, map);
    }
}
static int by_sink(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return x[TO] != y[TO] ? (x[TO] > y[TO] ? 1 : -1) : (x[TO_AT] > y[TO_AT]) - (x[TO_AT] < y[TO_AT]);
}
static int by_coordinate(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    for (int i = MODEL; i <= BYTE; i++)
        if (x[i] != y[i]) return x[i] > y[i] ? 1 : -1;
    return 0;
}
static size_t lower_boxes(const End *ends, uint64_t (*box)[ROW], size_t count) {
    moves.size = maps.size = 0;
    for (size_t i = 0; i < count; i++)
        for (uint64_t layer = box[i][4]; box[i][0] == ends[0].rank && box[i][1] == ends[1].rank && layer < box[i][5]; layer++) move_layer(ends, box[i], layer);
    return moves.size / (MOVE * sizeof(uint64_t));
}
static size_t lower(const Json *question) {
    const End ends[2] = {end_of(member(question, "source")), end_of(member(question, "sink"))};
    Plan plan = {.source = ends[0].side, .sink = ends[1].side};
    size_t count;
    uint64_t(*box)[ROW] = plan_rows(&plan, &count);
    return lower_boxes(ends, box, count);
}
static void say_runs(size_t count, int (*order)(const void *, const void *)) {
    uint64_t(*move)[MOVE] = (uint64_t(*)[MOVE])moves.text;
    size_t kept = 0;
    if (count) qsort(move, count, sizeof *move, order);
    for (size_t i = 0; i < count; i++) {
        uint64_t *last = kept ? move[kept - 1] : NULL, *next = move[i];
        if (last && last[FROM] == next[FROM] && last[TO] == next[TO] && last[FROM_AT] + last[LENGTH] == next[FROM_AT] && last[TO_AT] + last[LENGTH] == next[TO_AT]) last[LENGTH] += next[LENGTH];
        else memmove(move[kept++], next, sizeof *move);
    }
    say("[");
    for (size_t i = 0; i < kept; i++)
        for (int k = FROM; k <= LENGTH; k++) {
            say(k > FROM ? ", " : i ? "], [" : "[");
            say_number(move[i][k]);
        }
    say(kept ? "]]" : "]");
}
static uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) | 1;
}
static void answer_checksums(size_t count) {
    const uint64_t(*move)[MOVE] = (const uint64_t(*)[MOVE])moves.text;
    say("\"checksums\": {");
    for (size_t i = 0, next; i < count; i = next) { /* moves come group by group, as boxes do */
        uint64_t sum = 0;
        for (next = i; next < count && move[next][GROUP] == move[i][GROUP]; next++)
            for (uint64_t n = 0; n < move[next][LENGTH]; n++) {
                const uint64_t *m = move[next], part = mixed((m[MODEL] << 48) + (m[LAYER] << 16) + m[PART]);
                sum += (7 * (m[FROM_AT] + n) + m[FROM]) % 256 * mixed(m[GLOBAL] + part) * mixed(m[BYTE] + n);
            }
        say(i ? ", " : "");
        say_number(move[i][GROUP]);
        say(": ");
        say_number(sum);
    }
    say("}");
}

/* ---- windows that begin late ---- */

static uint64_t greatest_divisor(uint64_t a, uint64_t b) { return b ? greatest_divisor(b, a % b) : a; }
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
    return since <= from ? from : from + (since - from + step - 1) / step * step;
}
static bool inside_item(const Group *group, uint64_t cp_rank, const Node *grant) { /* where a window of whole items must not begin */
    uint64_t rows[2];
    rows_of(group, grant, &rows[0], &rows[1]);
    const uint64_t begin = rows_below(group, cp_rank, rows[0] * group->tokens);
    return group->opaque && group->kind == PAGE && begin % group->rows && begin < rows_below(group, cp_rank, rows[1] * group->tokens);
}
/* A window cut to the tokens that the source holds from a number on, and its items to those that are left; false where it begins below the number and is not late. */
static bool cut_late(const Group *group, uint64_t cp_rank, uint64_t since, Node *grant) {
    const Layout *grants = &LAYOUTS[L_Grants];
    Node *first = &grant->items[field_index(grants, "first")], *count = &grant->items[field_index(grants, "count")], *items = &grant->items[field_index(grants, "items")];
    uint64_t end = first->number + count->number, before[2], after[2], held = since ? begins_at(group, since) : 0;
    if (held <= first->number || !count->number || group->kind == SLOT || group->kind == HANDOFF) return true;
    if (!number(L_Grants, grant, "late")) return false;
    rows_of(group, grant, &before[0], &before[1]);
    first->number = held < end ? held : end;
    count->number = end - first->number;
    rows_of(group, grant, &after[0], &after[1]);
    uint64_t skipped = rows_below(group, cp_rank, after[0] * group->tokens), all = rows_below(group, cp_rank, after[1] * group->tokens);
    uint64_t gone = skipped / group->rows - rows_below(group, cp_rank, before[0] * group->tokens) / group->rows;
    if (skipped >= all) gone = items->count;
    if (group->kind == PAGE && gone <= items->count) {
        items->numbers += gone;
        items->count -= gone;
    }
    return true;
}
static void answer_late(const Json *question) {
    Node map = taken_map(&LAYOUTS[L_Group], member(question, "group"), NULL), grant = taken_map(&LAYOUTS[L_Grants], member(question, "grant"), NULL);
    const Group group = group_of(&map);
    uint64_t since = 0, asked = number(L_Grants, &grant, "first");
    for (const Json *each = member(question, "since")->items; each; each = each->next) {
        uint64_t mine = integer(each, NULL);
        since = mine > since ? mine : since;
    }
    const uint64_t cp_rank = integer(member(question, "cp_rank"), NULL);
    if (number(L_Grants, &grant, "count") && asked % group.tokens && (group.kind == PAGE || group.kind == RING)) refuse("BAD_GRANT", &(Path){NULL, "grants[0].first", 0});
    if (inside_item(&group, cp_rank, &grant)) refuse("BAD_GRANT", &(Path){NULL, "grants[0].first", 0});
    if (!cut_late(&group, cp_rank, since, &grant)) refuse("NOT_HELD", &(Path){NULL, "grants[0].first", 0});
    if (number(L_Grants, &grant, "first") != asked) {
        say("\"begins\": ");
        say_number(number(L_Grants, &grant, "first"));
        say(", ");
    }
    say("\"window\": ");
    say_map(&LAYOUTS[L_Grants], &grant);
}

/* ---- inline ---- */

static void answer_inline(const Json *question) {
    const uint64_t length = integer(member(question, "length"), NULL), total = integer(member(question, "total"), NULL);
    uint64_t unpacked = 0, counted = 0, which = 0, n = 0;
    const char *wrong = NULL, *path = "";
    for (const Json *each = member(question, "data")->items; each; each = each->next, n++) {
        const uint64_t offset = integer(each->items, NULL), size = integer(each->items->next, NULL);
        const bool last = !strcmp(each->items->next->next->text, "true"), beyond = size > total - counted;
        counted += beyond ? 0 : size;
        if (wrong) continue; /* the transfer has ended */
        which = n;
        if (beyond) wrong = "CREDIT", path = "data";
        else if (offset != unpacked || size > length - unpacked) wrong = "OUT_OF_RANGE", path = "offset";
        else if (last != (offset + size == length)) wrong = "FIELD_CONFLICT", path = "last";
        else unpacked += size;
    }
    say("\"unpacked\": ");
    say_number(unpacked);
    say(", \"counted\": ");
    say_number(counted);
    if (!wrong) return;
    say(", \"refused\": [");
    say_number(which);
    for (int i = 0; i < 2; i++) {
        say(", ");
        say_text(i ? path : wrong, strlen(i ? path : wrong));
    }
    say("]");
}

/* ---- the testee ---- */

static bool answer_of_lower(const char *op, const Json *question) {
    if (!strcmp(op, "lower")) {
        size_t count = lower(question);
        say("\"copies\": ");
        say_runs(count, by_sink);
    } else if (!strcmp(op, "stream")) {
        size_t count = lower(question);
        say("\"stream\": ");
        say_runs(count, by_coordinate);
    } else if (!strcmp(op, "checksums")) answer_checksums(lower(question));
    else if (!strcmp(op, "late")) answer_late(question);
    else if (!strcmp(op, "inline")) answer_inline(question);
    else return answer_of_plan(op, question);
    return true;
}
#ifndef LIVE
static bool answer_more(const char *op, const Json *question) { return answer_of_lower(op, question); }
#endif
