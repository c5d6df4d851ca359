/* Copy programs: where the rows of a window lie at both sides (lowering.md), in which order they are packed (packed.md), and their checksums (verify.md). */

/* ---- one side of a rank pair: where a byte of the lane axis lies ---- */

typedef struct { const kvp_end *end; const Rank *mine; } End;
typedef struct { const Group *group; const Share *share; const kvp_value *columns; const uint64_t *items; size_t item_count; uint64_t begin, end; } Window; /* rows of a group that one end names */
enum { COLUMNS = 5 };

static const kvp_value *of_group(Work *w, const kvp_value *list, int place, uint64_t group) {
    for (size_t i = 0; list && i < list->count; i++)
        if (list->items[i].items[place].number == group) return list->items[i].items;
    refuse(w, KVP_E_BAD_GRANT, NULL);
}
static Window window_of(Work *w, const End *end, const Group *group) {
    if (!end->end->columns) return (Window){.group = group, .end = UINT64_MAX}; /* the peer's, whose columns and items nobody here knows */
    const kvp_value *grants = of_group(w, end->end->windows, Grants_group, group->id);
    Window window = {.group = group, .columns = of_group(w, end->end->columns, Columns_group, group->id), .share = end->mine ? share_of(end->mine, group) : NULL,
        .items = grants[Grants_items].numbers, .item_count = grants[Grants_items].count};
    if (!window.share) refuse(w, KVP_E_BAD_GRANT, NULL);
    size_t entries = window.share->layers.count * group->count;
    for (int i = Columns_region; i <= Columns_lane_stride; i++)
        if (window.columns[i].count != entries) refuse(w, KVP_E_BAD_COLUMNS, NULL);
    rows_of(group, grants[Grants_first].number, grants[Grants_count].number, &window.begin, &window.end);
    uint64_t needed = items_needed(group, window.share->cp_rank, grants[Grants_first].number, grants[Grants_count].number);
    if (window.item_count < needed) refuse(w, KVP_E_BAD_GRANT, NULL);
    return window;
}
/* The place of a byte of a part's lane axis, in a row of an item; and how many bytes there follow it in its lane, or section of one. */
static uint64_t byte_at(const Window *window, size_t first, uint64_t layer, uint64_t item, uint64_t row, uint64_t byte, uint64_t *region, uint64_t *offset) {
    const Group *group = window->group;
    const Share *share = window->share;
    *region = *offset = 0;
    if (!share) return UINT64_MAX;
    uint64_t whole = group->parts[first].whole, lane = byte / whole, within_lane = byte % whole, before = 0;
    size_t part = first;
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
    const size_t column = cut_at(share->layers.numbers, share->layers.count, layer) * group->count + part;
    const kvp_value *c = window->columns;
    *region = c[Columns_region].numbers[column];
    *offset = c[Columns_offset].numbers[column] + item * c[Columns_item_stride].numbers[column] + row * c[Columns_row_stride].numbers[column]
        + before * c[Columns_lane_stride].numbers[column] + within_lane - group->parts[part].at;
    return group->parts[part].at + group->parts[part].bytes - within_lane;
}
static uint64_t item_of(Work *w, const Window *window, uint64_t i) {
    if (!window->share) return 0;
    if (i >= window->item_count) refuse(w, KVP_E_BAD_GRANT, NULL);
    return window->items[i];
}

/* ---- rows and moves ---- */

typedef struct { const Group *source, *sink; Pair classes; } Map;
typedef struct { Work *w; End ends[2]; Text moves, maps; const kvp_box *box; uint64_t layer, map; Window window[2]; size_t parts[2]; } Lowering;

static uint64_t map_number(Lowering *l, Map map) {
    const Map *known = (const Map *)l->maps.text;
    size_t count = l->maps.size / sizeof map, i = 0;
    while (i < count && (known[i].source != map.source || known[i].sink != map.sink || known[i].classes.source != map.classes.source || known[i].classes.sink != map.classes.sink)) i++;
    if (i == count) add(l->w, &l->maps, &map, sizeof map);
    return i;
}
static bool goes_on(const Lowering *l, const kvp_move *last, const kvp_move *next) { /* whether the next row is one more of the last move */
    const kvp_box *box = l->box;
    bool whole = last->byte == box->lo && last->length == box->hi - box->lo && next->byte == box->lo && next->length == last->length;
    bool same_place = last->layer == next->layer && last->classes == next->classes && last->part == next->part && last->group == next->group && last->model == next->model && last->source_region == next->source_region && last->sink_region == next->sink_region;
    uint64_t size = last->length * last->rows;
    return whole && same_place && last->row + last->rows == next->row && (!l->window[0].share || last->source_offset + size == next->source_offset) && (!l->window[1].share || last->sink_offset + size == next->sink_offset);
}
static void move_row(Lowering *l, const uint64_t *item, const uint64_t *row, uint64_t global) {
    const kvp_box *box = l->box;
    for (uint64_t byte = box->lo, step; byte < box->hi; byte += step) {
        kvp_move move = {.group = box->group, .source_group = l->window[0].group->id, .model = box->model, .layer = l->layer, .part = box->part, .classes = l->map, .row = global, .byte = byte, .rows = 1};
        uint64_t from = byte_at(&l->window[0], l->parts[0], l->layer, item[0], row[0], byte, &move.source_region, &move.source_offset);
        uint64_t to = byte_at(&l->window[1], l->parts[1], l->layer, item[1], row[1], byte, &move.sink_region, &move.sink_offset);
        step = from < to ? from : to;
        if (step > box->hi - byte) step = box->hi - byte;
        move.length = step;
        kvp_move *last = l->moves.size ? (kvp_move *)(l->moves.text + l->moves.size) - 1 : NULL;
        if (last && goes_on(l, last, &move)) last->rows++;
        else add(l->w, &l->moves, &move, sizeof move);
    }
}
/* Item and row of a row of the window's rank: of a page by its local row, of a ring by its global one. */
static void place_in(Work *w, const Window *window, uint64_t cp_rank, uint64_t local, uint64_t global, uint64_t *item, uint64_t *row) {
    const Group *group = window->group;
    uint64_t before = rows_below(group, cp_rank, window->begin * group->tokens) / group->rows;
    *item = item_of(w, window, group->kind == PAGE ? local / group->rows - before : 0);
    *row = (group->kind == PAGE ? local : global) % group->rows;
}
static void move_one_item(Lowering *l) { /* of a slot, or a ring that moves whole: rows from 0 */
    const Group *group = l->window[1].group;
    for (uint64_t i = 0; i < (group->opaque ? group->rows : group->live); i++) {
        uint64_t item[2] = {item_of(l->w, &l->window[0], 0), item_of(l->w, &l->window[1], 0)}, row[2] = {i, i};
        move_row(l, item, row, i);
    }
}
static void move_whole_items(Lowering *l) { /* every item that holds a row of the window */
    const Window *window = &l->window[1];
    const Group *group = window->group;
    const uint64_t cp[2] = {l->box->source_cp, l->box->sink_cp}, size = group->rows;
    uint64_t lo = rows_below(group, cp[1], window->begin * group->tokens), hi = rows_below(group, cp[1], window->end * group->tokens), item[2], row[2];
    for (uint64_t i = lo / size * size; lo < hi && i < (hi + size - 1) / size * size; i++) {
        for (int e = 0; e < 2; e++) place_in(l->w, &l->window[e], cp[e], i, 0, &item[e], &row[e]);
        move_row(l, item, row, global_row(group, cp[1], i));
    }
}
static void move_rows(Lowering *l) {
    const Group *from = l->window[0].group, *group = l->window[1].group;
    const uint64_t cp[2] = {l->box->source_cp, l->box->sink_cp};
    uint64_t begin = l->window[1].begin, end = l->window[1].end, item[2], row[2];
    if (group->kind == RING && l->window[1].share && end - begin > group->rows) refuse(l->w, KVP_E_BAD_GRANT, NULL);
    for (int e = 0; e < 2; e++) { /* nobody owns a token below the origin of a deal */
        const Group *dealt = l->window[e].group;
        if (dealt->cp_size > 1 && dealt->origin / dealt->tokens > begin) begin = dealt->origin / dealt->tokens;
    }
    for (uint64_t i = begin; i < end; i++) {
        const Place place[2] = {place_of(from, i * from->tokens), place_of(group, i * group->tokens)};
        if (!place[0].owned || !place[1].owned || place[0].cp_rank != cp[0] || place[1].cp_rank != cp[1]) continue;
        if (i < l->window[0].begin || i >= l->window[0].end) refuse(l->w, KVP_E_NOT_HELD, NULL);
        for (int e = 0; e < 2; e++) place_in(l->w, &l->window[e], cp[e], place[e].row, i, &item[e], &row[e]);
        move_row(l, item, row, i);
    }
}
static void move_box(Lowering *l, const kvp_box *box) {
    const Side *source = l->ends[0].end->description;
    const Group *group = group_with(l->ends[1].end->description, box->group);
    if (!group || box->part >= group->count) refuse(l->w, KVP_E_ROUTE_MISMATCH, NULL); /* a plan of another Description */
    if (group->kind == HANDOFF) return;
    const Part *part = &group->parts[box->part];
    const size_t word = word_of(source, &part->name);
    l->box = box;
    for (l->layer = box->layer; l->layer < box->layers; l->layer++) {
        const Group *from = claim_of(source, box->model, word, l->layer)->group;
        const Part *other = from ? part_named(from, &part->name) : NULL;
        if (!other) refuse(l->w, KVP_E_ROUTE_MISMATCH, NULL);
        l->window[0] = window_of(l->w, &l->ends[0], from);
        l->window[1] = window_of(l->w, &l->ends[1], group);
        for (int e = 0; e < 2; e++) {
            const kvp_value *layers = l->window[e].share ? &l->window[e].share->layers : NULL;
            size_t place = layers ? cut_at(layers->numbers, layers->count, l->layer) : 0;
            if (layers && (place == layers->count || layers->numbers[place] != l->layer)) refuse(l->w, KVP_E_ROUTE_MISMATCH, NULL);
        }
        l->parts[0] = (size_t)(other - from->parts);
        l->parts[1] = box->part;
        l->map = map_number(l, (Map){from, group, {box->source_cp, box->sink_cp}});
        if (group->kind == SLOT || (group->opaque && group->kind == RING)) move_one_item(l);
        else if (group->opaque) move_whole_items(l);
        else move_rows(l);
    }
}

/* ---- copies: moves that join on both sides ---- */

static int by_sink(const void *a, const void *b, const void *context) {
    const kvp_move *x = a, *y = b;
    (void)context;
    return x->sink_region != y->sink_region ? (x->sink_region > y->sink_region ? 1 : -1) : (x->sink_offset > y->sink_offset) - (x->sink_offset < y->sink_offset);
}
static int by_source(const void *a, const void *b, const void *context) {
    const kvp_move *x = a, *y = b;
    (void)context;
    return x->source_region != y->source_region ? (x->source_region > y->source_region ? 1 : -1) : (x->source_offset > y->source_offset) - (x->source_offset < y->source_offset);
}
static int by_coordinate(const void *a, const void *b, const void *context) { /* model, layer, part, classes, row, byte */
    const uint64_t *x = &((const kvp_move *)a)->model, *y = &((const kvp_move *)b)->model;
    (void)context;
    for (int i = 0; i < 6; i++)
        if (x[i] != y[i]) return x[i] > y[i] ? 1 : -1;
    return 0;
}
typedef struct { kvp_copy *copies; uint64_t *begins; size_t count; } Copies; /* begins: of each, the bytes before it */
struct kvp_program {
    Arena arena;
    kvp_move *moves; /* by coordinate */
    size_t count;
    bool known[2]; /* whose places are known */
    uint64_t bytes;
    Copies by_place, stream;
};
static Copies copies_of(Work *w, Arena *arena, const kvp_move *moves, size_t count, const bool *known) {
    Copies made = {.copies = taken_of(w, arena, count, sizeof(kvp_copy)), .begins = taken_of(w, arena, count, sizeof(uint64_t))};
    uint64_t before = 0;
    for (size_t i = 0; i < count; i++) {
        const kvp_move *next = &moves[i];
        kvp_copy copy = {next->source_region, next->source_offset, next->sink_region, next->sink_offset, next->length * next->rows}, *last = made.count ? &made.copies[made.count - 1] : NULL;
        bool from = last && last->source_region == copy.source_region && (!known[0] || last->source_offset + last->bytes == copy.source_offset);
        bool to = last && last->sink_region == copy.sink_region && (!known[1] || last->sink_offset + last->bytes == copy.sink_offset);
        if (from && to) last->bytes += copy.bytes;
        else {
            made.begins[made.count] = before;
            made.copies[made.count++] = copy;
        }
        before += copy.bytes;
    }
    return made;
}
typedef struct { const kvp_plan *plan; const kvp_end *ends[2]; Arena arena; kvp_program *made; } Lowered;
static void lower(Work *w, void *arguments) {
    Lowered *lowered = arguments;
    Arena *arena = &lowered->arena;
    const kvp_plan *plan = lowered->plan;
    Lowering l = {.w = w};
    for (int e = 0; e < 2; e++) {
        const Side *side = lowered->ends[e]->description;
        l.ends[e] = (End){lowered->ends[e], NULL};
        for (size_t i = 0; i < side->rank_count; i++)
            if (side->ranks[i].rank == lowered->ends[e]->rank) l.ends[e].mine = &side->ranks[i];
    }
    const kvp_end *sink = lowered->ends[1];
    for (size_t i = 0; i < plan->box_count; i++)
        if (plan->boxes[i].source == lowered->ends[0]->rank && plan->boxes[i].sink == sink->rank && (!sink->groups || among(sink->groups, sink->group_count, plan->boxes[i].group))) move_box(&l, &plan->boxes[i]);
    kvp_move *moves = (kvp_move *)l.moves.text;
    const size_t count = l.moves.size / sizeof *moves;
    kvp_program *program = taken_of(w, arena, 1, sizeof *program);
    *program = (kvp_program){.count = count, .known = {lowered->ends[0]->columns != NULL, lowered->ends[1]->columns != NULL}};
    sort(w, moves, count, sizeof *moves, program->known[1] ? by_sink : by_source, NULL);
    program->by_place = copies_of(w, arena, moves, count, program->known);
    sort(w, moves, count, sizeof *moves, by_coordinate, NULL);
    program->stream = copies_of(w, arena, moves, count, program->known);
    program->moves = taken_of(w, arena, count, sizeof *moves);
    if (count) memcpy(program->moves, moves, count * sizeof *moves);
    for (size_t i = 0; i < count; i++) program->bytes += moves[i].length * moves[i].rows;
    program->arena = *arena;
    lowered->made = program;
}
int kvp_lower(const kvp_plan *plan, const kvp_end *source, const kvp_end *sink, const kvp_options *options, kvp_program **program, kvp_error *error) {
    Work w;
    Lowered lowered = {.plan = plan, .ends = {source, sink}, .arena = {.options = options_of(options)}};
    int code = attempt(&w, options, error, lower, &lowered);
    if (code) release(&lowered.arena);
    else release(&w.arena);
    *program = lowered.made;
    return code;
}
const kvp_copy *kvp_program_copies(const kvp_program *program, size_t *count) {
    *count = program->by_place.count;
    return program->by_place.copies;
}
const kvp_copy *kvp_program_stream(const kvp_program *program, size_t *count) {
    *count = program->stream.count;
    return program->stream.copies;
}
const kvp_move *kvp_program_moves(const kvp_program *program, size_t *count) {
    *count = program->count;
    return program->moves;
}
uint64_t kvp_program_bytes(const kvp_program *program) { return program->bytes; }
void kvp_program_free(kvp_program *program) {
    if (program) release(&program->arena);
}

/* ---- what a program moves ---- */

static uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) | 1;
}
static int by_group(const void *a, const void *b, const void *context) {
    const kvp_sum *x = a, *y = b;
    (void)context;
    return (x->group > y->group) - (x->group < y->group);
}
typedef struct { kvp_locate *find; void *state; } Memory;
static uint8_t *found_at(Work *w, const Memory *memory, uint64_t region, uint64_t offset, uint64_t size) {
    uint8_t *found = memory->find(memory->state, region, offset, size);
    if (!found) refuse(w, KVP_E_OUT_OF_REGION, NULL);
    return found;
}
typedef struct { const kvp_program *program; bool at_sink; Memory memory[2]; kvp_sum *sums; size_t room, count; uint64_t from, size; uint8_t *bytes; } Moved;
enum { WEIGHTS = 4096 }; /* bytes of a row whose factors are kept */
static uint64_t sum_of_row(const uint8_t *bytes, uint64_t size, uint64_t byte, const uint64_t *weights) {
    uint64_t sum = 0;
    for (uint64_t n = 0; n < size; n++) sum += bytes[n] * (weights ? weights[n] : mixed(byte + n));
    return sum;
}
static void sum_moves(Work *w, void *arguments) {
    Moved *moved = arguments;
    const kvp_program *program = moved->program;
    uint64_t weights[WEIGHTS], weighed = 0, begin = 0; /* of bytes [begin, begin + weighed) */
    for (size_t i = 0; i < program->count; i++) {
        const kvp_move *m = &program->moves[i];
        const uint64_t part = mixed((m->model << 48) + (m->layer << 16) + m->part), size = m->length * m->rows;
        const uint8_t *bytes = moved->at_sink ? found_at(w, &moved->memory[1], m->sink_region, m->sink_offset, size) : found_at(w, &moved->memory[0], m->source_region, m->source_offset, size);
        if (m->length <= WEIGHTS && (begin != m->byte || weighed < m->length)) {
            for (weighed = 0, begin = m->byte; weighed < m->length; weighed++) weights[weighed] = mixed(begin + weighed);
        }
        size_t k = 0;
        while (k < moved->count && moved->sums[k].group != m->group) k++;
        if (k == moved->room) refuse(w, KVP_NO_ROOM, NULL);
        if (k == moved->count) moved->sums[moved->count++] = (kvp_sum){m->group, 0};
        for (uint64_t row = 0; row < m->rows; row++)
            moved->sums[k].value += sum_of_row(bytes + row * m->length, m->length, m->byte, m->length <= WEIGHTS ? weights : NULL) * mixed(m->row + row + part);
    }
    sort(w, moved->sums, moved->count, sizeof *moved->sums, by_group, NULL);
}
static int moved_by(Job *job, Moved *moved, kvp_error *error) {
    Work w;
    int code = attempt(&w, &moved->program->arena.options, error, job, moved);
    if (!code) release(&w.arena);
    return code;
}
int kvp_program_sums(const kvp_program *program, bool at_sink, kvp_locate *locate, void *state, kvp_sum *sums, size_t room, size_t *count, kvp_error *error) {
    Moved moved = {.program = program, .at_sink = at_sink, .memory = {{locate, state}, {locate, state}}, .sums = sums, .room = room};
    int code = program->known[at_sink] || !program->count ? moved_by(sum_moves, &moved, error) : misused(error);
    *count = moved.count;
    return code;
}
static void run(Work *w, void *arguments) {
    Moved *moved = arguments;
    const Copies *all = &moved->program->by_place;
    for (size_t i = 0; i < all->count; i++) {
        const kvp_copy *copy = &all->copies[i];
        const uint8_t *from = found_at(w, &moved->memory[0], copy->source_region, copy->source_offset, copy->bytes);
        memmove(found_at(w, &moved->memory[1], copy->sink_region, copy->sink_offset, copy->bytes), from, copy->bytes);
    }
}
int kvp_program_run(const kvp_program *program, kvp_locate *source, void *source_state, kvp_locate *sink, void *sink_state, kvp_error *error) {
    Moved moved = {.program = program, .memory = {{source, source_state}, {sink, sink_state}}};
    return !program->count || (program->known[0] && program->known[1]) ? moved_by(run, &moved, error) : misused(error);
}
static void stream(Work *w, void *arguments) { /* into the caller's bytes, or out of them */
    Moved *moved = arguments;
    const Copies *all = &moved->program->stream;
    if (moved->from > moved->program->bytes || moved->size > moved->program->bytes - moved->from) refuse(w, KVP_E_OUT_OF_RANGE, NULL);
    size_t i = cut_at(all->begins, all->count, moved->from + 1) - 1; /* the one that holds the first byte */
    for (uint64_t done = 0; done < moved->size; i++) {
        const kvp_copy *copy = &all->copies[i];
        uint64_t skip = moved->from + done - all->begins[i], size = copy->bytes - skip < moved->size - done ? copy->bytes - skip : moved->size - done;
        if (moved->at_sink) memcpy(found_at(w, &moved->memory[1], copy->sink_region, copy->sink_offset + skip, size), moved->bytes + done, size);
        else memcpy(moved->bytes + done, found_at(w, &moved->memory[0], copy->source_region, copy->source_offset + skip, size), size);
        done += size;
    }
}
static int streamed(const kvp_program *program, bool at_sink, uint64_t from, void *bytes, uint64_t size, kvp_locate *locate, void *state, kvp_error *error) {
    Moved moved = {.program = program, .at_sink = at_sink, .memory = {{locate, state}, {locate, state}}, .from = from, .size = size, .bytes = bytes};
    return !program->count || program->known[at_sink] ? moved_by(stream, &moved, error) : misused(error);
}
int kvp_program_pack(const kvp_program *program, uint64_t from, void *bytes, uint64_t size, kvp_locate *source, void *state, kvp_error *error) {
    return streamed(program, false, from, bytes, size, source, state, error);
}
int kvp_program_unpack(const kvp_program *program, uint64_t from, const void *bytes, uint64_t size, kvp_locate *sink, void *state, kvp_error *error) {
    return streamed(program, true, from, (void *)bytes, size, sink, state, error);
}
