/* Transfers of a source: prompts and tickets, what of a Transfer is refused, copies, Data, Done, Failed, Abort; from transfers.md, lowering.md, handoff.md, verify.md and packed.md.
 * Included by source.c. */
#include "mapping.c"

enum { HELD, FREED, UNDELIVERED, EXPIRED };
enum { WAITING, RUNNING, STREAMING, DONE, FAILED_BY, ENDED };
enum { UNDER_WAY, DELIVERED, LOST };
typedef struct Prompt { /* a request of the engine */
    struct Prompt *next;
    char *id, key[16], content[32];
    uint64_t *tokens, count, computed;
    double deadline;
    bool finished, ends, given_up; /* finished: prefill is over; ends: the first token ends the text */
    int state;
    unsigned items[GROUPS][ITEMS];
    int held[GROUPS];
    Text handoff[GROUPS][2];
} Prompt;
typedef struct { uint64_t session, sequence, rank; int state; } Use;
typedef struct Ticket { /* that a Transfer has named */
    struct Ticket *next;
    char key[16], *engine;
    uint64_t replica;
    Use *uses;
    size_t count;
    bool over;       /* its transfers are */
    uint64_t *ranks; /* of the sink, that are routed from this source */
    size_t rank_count;
} Ticket;
struct Transfer {
    Transfer *next;
    uint64_t sequence, request, early, sent, bytes; /* request: id of its Transfer; early: rows of tokens below are copied; sent: bytes of the stream */
    int state;
    bool aborted, unseen; /* unseen: aborted before it came */
    char key[16], content[32];
    const kvp_value *grants; /* as asked */
    kvp_value *windows;      /* as served */
    size_t grant_count;
    Prompt *prompt;
    double until; /* while it waits for its prompt */
    Text failed, packed; /* what Failed says; the stream */
    Block *memory;
};
static Prompt *prompts;
static Ticket *tickets;

static bool ended_prompt(const Prompt *prompt) { return prompt->state != HELD; }
static Ticket *ticket_with(const char *key) {
    Ticket *each = tickets;
    while (each && memcmp(each->key, key, 16)) each = each->next;
    return each;
}
static Prompt *prompt_with(const char *key) { /* whose ticket's deadline has not passed */
    Prompt *each = prompts;
    while (each && (each->state == EXPIRED || memcmp(each->key, key, 16))) each = each->next;
    return each;
}
static void forget_ticket(Ticket *ticket) {
    Ticket **each = &tickets;
    while (*each != ticket) each = &(*each)->next;
    *each = ticket->next;
    free(ticket->engine);
    free(ticket->uses);
    free(ticket->ranks);
    free(ticket);
}
static void give_pages_back(Prompt *prompt) {
    for (int g = 0; g < pool.count; g++)
        for (int i = 0; i < prompt->held[g]; i++) pool.used[g][prompt->items[g][i]] = false;
    memset(prompt->held, 0, sizeof prompt->held);
}

/* ---- transfers: each above the low-water mark ---- */

static Transfer *transfer_of(const Session *session, uint64_t sequence) {
    Transfer *each = session->sink->transfers;
    while (each && each->sequence != sequence) each = each->next;
    return each;
}
static Transfer *new_transfer(Session *session, uint64_t sequence) {
    Transfer *transfer = calloc(1, sizeof *transfer);
    if (!transfer) abort();
    *transfer = (Transfer){.next = session->sink->transfers, .sequence = sequence, .state = ENDED};
    return session->sink->transfers = transfer;
}
static void free_transfer(Transfer *transfer) {
    Block *outer = blocks;
    blocks = transfer->memory;
    give_back();
    blocks = outer;
    free(transfer->failed.text);
    free(transfer->packed.text);
    free(transfer);
}
static void settle(Ticket *ticket) { /* whether the request is over: every sink rank has its bytes, or none may still get them */
    bool all = true, under_way = false;
    for (size_t r = 0; r < ticket->rank_count; r++) {
        bool delivered = false, named = false;
        for (size_t i = 0; i < ticket->count; i++) {
            if (ticket->uses[i].rank != ticket->ranks[r]) continue;
            named = true;
            delivered |= ticket->uses[i].state == DELIVERED;
            under_way |= ticket->uses[i].state == UNDER_WAY;
        }
        under_way |= !named;
        all &= delivered;
    }
    Prompt *prompt = prompt_with(ticket->key);
    if ((under_way && !all) || !prompt || ended_prompt(prompt)) return;
    ticket->over = true;
    prompt->state = all ? FREED : UNDELIVERED;
    give_pages_back(prompt);
}
static void mark_use(const Session *session, const Transfer *transfer, int state) {
    Ticket *ticket = ticket_with(transfer->key);
    for (size_t i = 0; ticket && i < ticket->count; i++) {
        Use *use = &ticket->uses[i];
        if (use->session != session->id || use->sequence != transfer->sequence || use->state != UNDER_WAY) continue;
        use->state = state;
        settle(ticket);
        return;
    }
}
static void raise_mark(Session *session) { /* the highest sequence for which it and all below have ended; they are forgotten */
    Sink *sink = session->sink;
    for (;;) {
        bool any = false, open = false;
        for (const Transfer *each = sink->transfers; each; each = each->next) {
            any |= each->sequence == sink->low + 1;
            open |= each->sequence == sink->low + 1 && each->state != ENDED;
        }
        if (!any || open) return;
        sink->low++;
        for (Transfer **each = &sink->transfers; *each;) {
            Transfer *found = *each;
            if (found->sequence != sink->low) {
                each = &found->next;
                continue;
            }
            *each = found->next;
            if (!found->unseen) mark_use(session, found, LOST); /* where it is not delivered */
            free_transfer(found);
        }
    }
}
static bool drop_request(Session *session, int kind, const Transfer *transfer, uint64_t id) { /* whether it was out; id 0: whatever its id */
    for (Request **each = &session->requests; *each; each = &(*each)->next)
        if ((*each)->kind == kind && (*each)->sequence == transfer->sequence && (!id || (*each)->id == id)) {
            Request *found = *each;
            *each = found->next;
            free(found->frame.text);
            free(found);
            return true;
        }
    return false;
}
static void form_ids(Text *json, const Session *session, uint64_t request, uint64_t sequence) {
    form(json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"sequence\": \"%llu\"", (unsigned long long)session->id, (unsigned long long)request, (unsigned long long)sequence);
}
static void fail_as(Session *session, Transfer *transfer, uint64_t id) { /* with what was refused last; id: of the Transfer that it answers, or 0 */
    Text json = {0};
    transfer->failed.size = 0;
    form_refusal(&transfer->failed);
    transfer->state = FAILED_BY;
    free(transfer->packed.text);
    transfer->packed = (Text){0};
    form_ids(&json, session, id ? id : session->next_request++, transfer->sequence);
    form(&json, "%s}", transfer->failed.text);
    if (id) notice(session, KVP_FAILED, json.text); /* a reply: again only if the Transfer comes again */
    else await_answer(session, KVP_FAILED, session->next_request - 1, transfer->sequence, frame_of(KVP_FAILED, json.text));
    free(json.text);
}
static void fail(Session *session, Transfer *transfer, const char *error, const char *path) {
    code = error;
    where.size = 0;
    add(&where, path, strlen(path));
    fail_as(session, transfer, 0);
}
static void accept(Session *session, const Transfer *transfer, uint64_t request) {
    Text json = {0};
    form_ids(&json, session, request, transfer->sequence);
    form(&json, ", \"state\": \"%s\"}", !transfer->prompt ? "PENDING" : transfer->prompt->finished ? "READY" : "RUNNING");
    notice(session, KVP_ACCEPTED, json.text);
    free(json.text);
}

/* ---- what of a Transfer is refused, in the order of its table ---- */

static const Share *share_in(const End *end, const Group *group) {
    const Share *share = end->mine->shares;
    while (share->group != group) share++;
    return share;
}
static size_t part_named(const Group *group, const kvp_value *name) { /* its place; that of none where it has no such part */
    size_t p = 0;
    while (p < group->count && !same(&group->parts[p].name, name)) p++;
    return p;
}
static const Group *origin_of(const Session *session, const kvp_box *box) { /* the group of this source, of one rank, from which a box is read */
    const Part *part = &group_with(session->side, box->group)->parts[box->part];
    const Rank *mine = me.end.mine;
    for (size_t i = 0; i < mine->count; i++) {
        const Share *share = &mine->shares[i];
        if (share->group->model != box->model || part_named(share->group, &part->name) == share->group->count) continue;
        for (size_t k = 0; k < share->layers.count; k++)
            if (share->layers.numbers[k] == box->layer) return share->group;
    }
    abort();
}
static void rows_of(const Group *group, const kvp_value *grant, uint64_t *begin, uint64_t *end) {
    uint64_t first = kvp_number(grant, KVP_GRANTS_FIRST), count = kvp_number(grant, KVP_GRANTS_COUNT), s = group->tokens;
    *begin = group->partial ? first / s : (first + s - 1) / s;
    *end = (first + count + (group->partial ? s - 1 : 0)) / s;
    if (!count || *end < *begin) *end = *begin;
}
static kvp_window served(const Session *session, const Group *group, const kvp_value *grant, uint64_t since, int *result) { /* of a window, what there is from a token on */
    kvp_window window = {0};
    *result = kvp_deal_late(group->deal, share_in(&session->sink->end, group)->cp_rank, since, grant, &window, &refusal);
    return window;
}
static _Noreturn void bad_grant(const char *error, size_t i, const char *name, const char *mine, const char *yours) { deny_at(error, "grants[%zu]", i, name, -1, mine, yours); }
static void check_agreement(const Session *session, const kvp_value *map) {
    kvp_value writers = field(map, KVP_TRANSFER_WRITERS);
    size_t n = 0;
    if (kvp_number(map, KVP_TRANSFER_SOURCE_VERSION) != 1) deny("DESCRIPTION_MISMATCH", "source_version", "1", "another");
    if (kvp_number(map, KVP_TRANSFER_SINK_VERSION) != session->version) deny("BAD_GRANT", "sink_version", "that of Describe", "another");
    if (kvp_number(map, KVP_TRANSFER_EPOCH) != session->sink->epoch) deny("BAD_GRANT", "epoch", "that of Register", "another");
    for (size_t i = 0; i < session->boxes; i++) {
        if (session->box[i].sink != session->rank || (n && writers.numbers[n - 1] == session->box[i].source)) continue;
        if (n >= writers.count || writers.numbers[n++] != session->box[i].source) deny("BAD_GRANT", "writers", "the ranks with a route to this sink rank", "others");
    }
    if (n != writers.count) deny("BAD_GRANT", "writers", "the ranks with a route to this sink rank", "more");
}
static void check_groups(const Session *session, const kvp_value *grants) {
    size_t n = 0;
    uint64_t before = UINT64_MAX;
    for (size_t i = 0; i < session->boxes; i++) {
        if (!routed(session, i) || session->box[i].group == before) continue;
        before = session->box[i].group;
        if (n >= grants->count || kvp_number(&grants->items[n++], KVP_GRANTS_GROUP) != before) deny("BAD_GRANT", "grants", "the routed groups", "others");
    }
    if (n != grants->count) deny("BAD_GRANT", "grants", "the routed groups", "more");
}
static bool begins_early(const Session *session, const Group *group, uint64_t first) { /* before the origin of a deal, of either side */
    if (group->cp_size > 1 && first < group->origin) return true;
    for (size_t i = 0; i < session->boxes; i++) {
        if (!routed(session, i) || session->box[i].group != group->id) continue;
        const Group *from = origin_of(session, &session->box[i]);
        if (from->cp_size > 1 && first < from->origin) return true;
    }
    return false;
}
static uint64_t items_needed(const Session *session, const Group *group, const kvp_value *grant) {
    return kvp_deal_items(group->deal, share_in(&session->sink->end, group)->cp_rank, kvp_number(grant, KVP_GRANTS_FIRST), kvp_number(grant, KVP_GRANTS_COUNT));
}
static int by_number(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}
static void check_grant(const Session *session, const kvp_value *grant, size_t i, uint64_t *all) {
    const Group *group = group_with(session->side, kvp_number(grant, KVP_GRANTS_GROUP));
    const End *end = &session->sink->end;
    kvp_value items = field(grant, KVP_GRANTS_ITEMS);
    uint64_t first = kvp_number(grant, KVP_GRANTS_FIRST), count = kvp_number(grant, KVP_GRANTS_COUNT), begin, stop;
    int result;
    if ((*all += items.count) > KVP_MAX_ITEMS) bad_grant("BAD_GRANT", i, "items", "no more than max_items", "more");
    rows_of(group, grant, &begin, &stop);
    if (group->kind != HANDOFF) {
        if (group->kind != SLOT && count && first % group->tokens) bad_grant("BAD_GRANT", i, "first", "the beginning of a row", "within one");
        served(session, group, grant, 0, &result);
        if (result) bad_grant("BAD_GRANT", i, "first", "the beginning of an item", "within one");
        if (group->kind == RING && stop - begin > group->rows) bad_grant("BAD_GRANT", i, "count", "no more rows than the ring has", "more");
        if (count && begins_early(session, group, first)) bad_grant("BAD_GRANT", i, "first", "no token before the origin", "one");
    }
    if (items.count != items_needed(session, group, grant)) bad_grant("BAD_GRANT", i, "items", "as many as the window needs", "another number");
    if (!items.count) return;
    uint64_t pool_items = kvp_number(of_group(&end->columns, group->id), KVP_COLUMNS_ITEMS);
    for (size_t k = 0; k < items.count; k++)
        if (items.numbers[k] >= pool_items) bad_grant("OUT_OF_REGION", i, "items", "items of the pool", "one beyond it");
    uint64_t *sorted = get(items.count * sizeof *sorted);
    memcpy(sorted, items.numbers, items.count * sizeof *sorted);
    qsort(sorted, items.count, sizeof *sorted, by_number);
    for (size_t k = 1; k < items.count; k++)
        if (sorted[k] == sorted[k - 1]) bad_grant("ITEM_ALIAS", i, "items", "each item once", "one twice");
}
static const kvp_value *grant_of(const kvp_value *grants, uint64_t group, size_t *i) {
    for (*i = 0; *i < grants->count; ++*i)
        if (kvp_number(&grants->items[*i], KVP_GRANTS_GROUP) == group) return &grants->items[*i];
    return NULL;
}
static bool is_scale_of(const char *name, const char *other) { /* of the registered names, those of scales end so (parts.md) */
    size_t size = strlen(other);
    return !strncmp(name, other, size) && !strcmp(name + size, "_scale");
}
static void check_scale_windows(const Session *session, const kvp_value *grants) { /* KVP-GRANT-SCALES */
    for (size_t i = 0, j; i < grants->count; i++) {
        const Group *group = group_with(session->side, kvp_number(&grants->items[i], KVP_GRANTS_GROUP));
        for (size_t p = 0; group->partial && group->kind == PAGE && p < group->count; p++) {
            const char *name = kvp_part_named(group->parts[p].name.bytes, group->parts[p].name.count, NULL);
            for (size_t n = 0; name && n < session->side->group_count; n++) {
                const Group *rows_group = &session->side->groups[n];
                const kvp_value *grant = grant_of(grants, rows_group->id, &j);
                bool scaled = false;
                for (size_t q = 0; q < rows_group->count; q++) {
                    const char *other = kvp_part_named(rows_group->parts[q].name.bytes, rows_group->parts[q].name.count, NULL);
                    scaled |= other && is_scale_of(name, other);
                }
                if (!grant || !scaled || rows_group->partial || rows_group->kind != PAGE || rows_group->model != group->model) continue;
                uint64_t origin = group->origin > rows_group->origin ? group->origin : rows_group->origin, a = kvp_number(&grants->items[i], KVP_GRANTS_FIRST), b = kvp_number(grant, KVP_GRANTS_FIRST);
                if (!kvp_number(&grants->items[i], KVP_GRANTS_COUNT) && !kvp_number(grant, KVP_GRANTS_COUNT)) continue;
                if ((a > origin ? a : origin) != (b > origin ? b : origin)) bad_grant("BAD_GRANT", i, "first", "where the rows begin that these scale", "elsewhere");
            }
        }
    }
}

/* ---- items that lie over each other ---- */

typedef struct { uint64_t region, begin, end; size_t grant; } Place;
static int by_begin(const void *a, const void *b) {
    const Place *x = a, *y = b;
    if (x->region != y->region) return x->region > y->region ? 1 : -1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}
static size_t over_each_other(Text *spans) { /* the grant whose bytes another's lie over; SIZE_MAX where none do */
    Place *each = (Place *)spans->text;
    size_t count = spans->size / sizeof *each, found = SIZE_MAX;
    if (count) qsort(each, count, sizeof *each, by_begin);
    for (size_t i = 1, far = 0; i < count; i++) {
        if (each[i].region == each[far].region && each[i].begin < each[far].end) {
            size_t later = each[i].grant > each[far].grant ? each[i].grant : each[far].grant;
            found = later < found ? later : found;
        }
        if (each[i].region != each[far].region || each[i].end > each[far].end) far = i;
    }
    return found;
}
static void add_spans(Text *spans, const Session *session, const kvp_value *grants, bool whole) { /* of each column: all that its granted items reach, or each row of a lane */
    const End *end = &session->sink->end;
    for (size_t i = 0; i < grants->count; i++) {
        const Group *group = group_with(session->side, kvp_number(&grants->items[i], KVP_GRANTS_GROUP));
        kvp_value items = field(&grants->items[i], KVP_GRANTS_ITEMS);
        if (!items.count || group->kind == HANDOFF) continue;
        const kvp_value *columns = of_group(&end->columns, group->id);
        const Share *share = share_in(end, group);
        for (size_t k = 0; k < share->layers.count * group->count; k++) {
            uint64_t lanes = 0, size = group->parts[k % group->count].bytes, region = kvp_field(columns, KVP_COLUMNS_REGION)->numbers[k], offset = kvp_field(columns, KVP_COLUMNS_OFFSET)->numbers[k];
            uint64_t strides[3] = {kvp_field(columns, KVP_COLUMNS_ITEM_STRIDE)->numbers[k], kvp_field(columns, KVP_COLUMNS_ROW_STRIDE)->numbers[k], kvp_field(columns, KVP_COLUMNS_LANE_STRIDE)->numbers[k]};
            for (size_t n = 0; n < share->count; n++)
                if (share->spans[n].part == k % group->count) lanes += share->spans[n].hi - share->spans[n].lo;
            uint64_t reach = size + (group->rows > 1 ? (group->rows - 1) * strides[1] : 0) + (lanes > 1 ? (lanes - 1) * strides[2] : 0), least = UINT64_MAX, most = 0;
            for (size_t n = 0; n < items.count; n++) {
                uint64_t begin = offset + items.numbers[n] * (kvp_number(columns, KVP_COLUMNS_ITEMS) > 1 ? strides[0] : 0);
                least = begin < least ? begin : least;
                most = begin > most ? begin : most;
                for (uint64_t row = 0; !whole && row < group->rows; row++)
                    for (uint64_t lane = 0; lane < lanes; lane++) {
                        uint64_t from = begin + (group->rows > 1 ? row * strides[1] : 0) + (lanes > 1 ? lane * strides[2] : 0);
                        Place *last = spans->size ? (Place *)(spans->text + spans->size) - 1 : NULL;
                        if (last && last->region == region && last->grant == i && last->end == from) last->end += size;
                        else add(spans, &(Place){region, from, from + size, i}, sizeof(Place));
                        if (spans->size / sizeof(Place) > KVP_MAX_SPANS) {
                            free(spans->text);
                            bad_grant("ITEM_ALIAS", i, "items", "no more spans than can be compared", "more");
                        }
                    }
            }
            if (whole) add(spans, &(Place){region, least, most + reach, i}, sizeof(Place));
        }
    }
}
static void check_alias(const Session *session, const kvp_value *grants) {
    for (int pass = 0; pass < 2; pass++) { /* first whole columns, which mostly lie apart */
        Text spans = {0};
        add_spans(&spans, session, grants, !pass);
        size_t found = over_each_other(&spans);
        free(spans.text);
        if (found == SIZE_MAX) return;
        if (pass) bad_grant("ITEM_ALIAS", found, "items", "no byte twice", "items over each other");
    }
}

/* ---- what needs the prompt ---- */

static void check_ticket(const Session *session, const char *key, uint64_t sequence) { /* 13 and 14 */
    const Ticket *ticket = ticket_with(key);
    if (!ticket) return;
    if (strcmp(ticket->engine, session->sink->engine) || ticket->replica != session->sink->replica) deny("TICKET_BOUND", "ticket", "another sink", "this one");
    for (size_t i = 0; i < ticket->count; i++)
        if (ticket->uses[i].session == session->id && ticket->uses[i].sequence != sequence) deny("TICKET_USED", "ticket", "another sequence", "this one");
}
static uint64_t held_since(const Session *session, uint64_t group, const Prompt *prompt) { /* the first token of which all rows are there, in all groups that it is read from */
    uint64_t since = 0;
    for (size_t i = 0; i < session->boxes; i++) {
        if (!routed(session, i) || session->box[i].group != group) continue;
        const Group *from = origin_of(session, &session->box[i]);
        uint64_t rows = prompt->computed / from->tokens, mine = from->kind == RING && rows > from->rows ? (rows - from->rows) * from->tokens : 0;
        since = mine > since ? mine : since;
    }
    return since;
}
static void check_windows(const Session *session, const Transfer *transfer) { /* 15 and 16 */
    const Prompt *prompt = transfer->prompt;
    static char mine[32], yours[32];
    for (size_t i = 0; i < transfer->grant_count; i++) {
        const kvp_value *grant = &transfer->grants[i];
        const Group *group = group_with(session->side, kvp_number(grant, KVP_GRANTS_GROUP));
        snprintf(mine, sizeof mine, "%llu", (unsigned long long)prompt->count);
        snprintf(yours, sizeof yours, "%llu", (unsigned long long)kvp_number(grant, KVP_GRANTS_VALID));
        if (group->kind != HANDOFF && kvp_number(grant, KVP_GRANTS_VALID) > prompt->count) bad_grant("BAD_GRANT", i, "valid", mine, yours);
    }
    for (size_t i = 0; i < transfer->grant_count; i++) {
        const kvp_value *grant = &transfer->grants[i];
        const Group *group = group_with(session->side, kvp_number(grant, KVP_GRANTS_GROUP));
        uint64_t first = kvp_number(grant, KVP_GRANTS_FIRST), since = held_since(session, group->id, prompt);
        snprintf(mine, sizeof mine, "%llu", (unsigned long long)since);
        snprintf(yours, sizeof yours, "%llu", (unsigned long long)first);
        int result;
        served(session, group, grant, since, &result);
        if (result) bad_grant("NOT_HELD", i, "first", mine, yours);
    }
}
static void check_finished(const Session *session, const Transfer *transfer) { /* once prefill is over */
    static char mine[32], yours[32];
    for (size_t i = 0; i < transfer->grant_count; i++) {
        const kvp_value *grant = &transfer->grants[i], state = field(grant, KVP_GRANTS_STATE_AFTER);
        const Group *group = group_with(session->side, kvp_number(grant, KVP_GRANTS_GROUP));
        if (group->kind == HANDOFF) continue;
        snprintf(mine, sizeof mine, "%llu", (unsigned long long)transfer->prompt->computed);
        snprintf(yours, sizeof yours, "%llu", (unsigned long long)kvp_number(grant, KVP_GRANTS_VALID));
        if (kvp_number(grant, KVP_GRANTS_VALID) > transfer->prompt->computed) bad_grant("BAD_GRANT", i, "valid", mine, yours);
        snprintf(yours, sizeof yours, "%llu", (unsigned long long)state.number);
        if (state.kind && state.number != transfer->prompt->computed) bad_grant("STATE_POSITION", i, "state_after", mine, yours);
    }
}

/* ---- copies ---- */

static void *sink_place(void *state, uint64_t region, uint64_t offset, uint64_t size) { /* in the memory that the sink has registered (KVP-REG-COLUMNS) */
    const Session *session = state;
    for (size_t i = 0; i < session->sink->region_count; i++) {
        const Mapped *mapped = &session->sink->regions[i];
        if (mapped->id == region) return offset <= mapped->length && size <= mapped->length - offset ? mapped->bytes + offset : NULL;
    }
    return NULL;
}
static End this_end(const Prompt *prompt) { /* this source's memory, with the items of a request */
    Text json = {0};
    End end = me.end;
    form(&json, "[");
    for (int g = 0; g < pool.count; g++) {
        const Cache *cache = &pool.caches[g];
        uint64_t rows = (uint64_t)cache->rows, first = !strcmp(cache->kind, "RING") && prompt->count > rows ? prompt->count - rows : 0;
        form(&json, "%s{\"group\": \"%d\", \"first\": \"%llu\", \"count\": \"%llu\", \"valid\": \"%llu\", \"items\": [", g ? ", " : "", g, (unsigned long long)first, (unsigned long long)(prompt->count - first), (unsigned long long)prompt->count);
        for (int i = 0; i < prompt->held[g]; i++) form(&json, "%s\"%u\"", i ? ", " : "", prompt->items[g][i]);
        form(&json, "]}");
    }
    form(&json, "]");
    end.windows = list_of_json(KVP_GRANTS, json.text);
    free(json.text);
    return end;
}
static bool is_early(const Session *session, uint64_t group) { /* of pages alone, whose rows are there before prefill is over */
    for (size_t i = 0; i < session->boxes; i++)
        if (routed(session, i) && session->box[i].group == group && origin_of(session, &session->box[i])->kind != PAGE) return false;
    return true;
}
static kvp_program *lower_transfer(const Session *session, const Transfer *transfer, bool all) { /* all, or what may be copied before prefill is over */
    uint64_t *groups = get(transfer->grant_count * sizeof *groups);
    size_t count = 0;
    for (size_t i = 0; i < transfer->grant_count; i++) {
        uint64_t group = kvp_number(&transfer->grants[i], KVP_GRANTS_GROUP);
        if (all || is_early(session, group)) groups[count++] = group;
    }
    const End source = this_end(transfer->prompt);
    End sink = session->sink->end;
    sink.windows = (kvp_value){.kind = KVP_KIND_LIST, .items = all ? transfer->windows : transfer->grants, .count = transfer->grant_count};
    return lowered(session->plan, &source, &sink, groups, count);
}
static uint64_t rows_before(const kvp_move *move, uint64_t tokens) { /* of a move of early pages, how many are there once so many tokens are computed */
    uint64_t rows = tokens / group_with(me.side, move->source_group)->tokens;
    return rows <= move->row ? 0 : rows - move->row < move->rows ? rows - move->row : move->rows;
}
static void copy_rows(Session *session, Transfer *transfer) { /* what is computed, and was not copied before */
    const Prompt *prompt = transfer->prompt;
    size_t count;
    const kvp_move *move = kvp_program_moves(lower_transfer(session, transfer, prompt->finished), &count);
    for (size_t i = 0; i < count; i++) {
        bool early = is_early(session, move[i].group);
        uint64_t from = early ? rows_before(&move[i], transfer->early) : 0, to = prompt->finished ? move[i].rows : rows_before(&move[i], prompt->computed), size = move[i].length;
        if (to <= from) continue;
        uint8_t *place = sink_place(session, move[i].sink_region, move[i].sink_offset + from * size, (to - from) * size);
        if (!place) abort();
        memcpy(place, pool.bytes + move[i].source_offset + from * size, (to - from) * size);
    }
    transfer->early = prompt->computed;
}
static void pack(const Session *session, Transfer *transfer) { /* the stream, whole */
    const kvp_program *program = lower_transfer(session, transfer, true);
    uint64_t size = kvp_program_bytes(program);
    check(kvp_program_pack(program, 0, room_in(&transfer->packed, size), size, pool_place, NULL, &refusal));
    transfer->packed.size += size;
}

/* ---- Done ---- */

static void form_begins(Text *json, const Transfer *transfer) {
    bool more = false;
    for (size_t i = 0; i < transfer->grant_count; i++) {
        uint64_t asked = kvp_number(&transfer->grants[i], KVP_GRANTS_FIRST), first = kvp_number(&transfer->windows[i], KVP_GRANTS_FIRST);
        if (first == asked) continue;
        form(json, "%s{\"group\": \"%llu\", \"first\": \"%llu\"}", more ? ", " : ", \"begins\": [", (unsigned long long)kvp_number(&transfer->grants[i], KVP_GRANTS_GROUP), (unsigned long long)first);
        more = true;
    }
    if (more) form(json, "]");
}
static void form_handoff(Text *json, const Session *session, const Transfer *transfer) {
    uint64_t before = UINT64_MAX;
    form(json, ", \"handoff\": [");
    for (size_t i = 0; i < session->boxes; i++) { /* boxes of a group come in ascending order of its parts */
        const kvp_box *box = &session->box[i];
        const Group *group = group_with(session->side, box->group);
        if (!routed(session, i) || group->kind != HANDOFF) continue;
        if (box->group != before) form(json, "%s{\"group\": \"%llu\", \"data\": \"", before == UINT64_MAX ? "" : "\"}, ", (unsigned long long)box->group);
        before = box->group;
        const Group *from = origin_of(session, box);
        const Text *held = &transfer->prompt->handoff[from->id][part_named(from, &group->parts[box->part].name)];
        for (uint64_t byte = box->lo; byte < box->hi; byte++) form(json, "%02x", byte < held->size ? (uint8_t)held->text[byte] : 0);
    }
    form(json, before == UINT64_MAX ? "]" : "\"}]");
}
static void form_checksums(Text *json, const kvp_program *program) {
    kvp_sum sums[GROUPS];
    size_t count;
    check(kvp_program_sums(program, false, pool_place, NULL, sums, GROUPS, &count, &refusal));
    form(json, ", \"checksums\": [");
    for (size_t i = 0; i < count; i++) form(json, "%s{\"group\": \"%llu\", \"value\": \"%llu\"}", i ? ", " : "", (unsigned long long)sums[i].group, (unsigned long long)sums[i].value);
    form(json, "]");
}
static void send_done(Session *session, Transfer *transfer) {
    Text json = {0};
    const Prompt *prompt = transfer->prompt;
    const kvp_program *program = lower_transfer(session, transfer, true);
    uint64_t id = session->next_request++;
    form_ids(&json, session, id, transfer->sequence);
    form(&json, ", \"writer\": \"0\", \"groups\": [");
    for (size_t i = 0; i < transfer->grant_count; i++) form(&json, "%s\"%llu\"", i ? ", " : "", (unsigned long long)kvp_number(&transfer->grants[i], KVP_GRANTS_GROUP));
    form(&json, "], \"bytes\": \"%llu\", \"outcome\": \"%s\"", (unsigned long long)kvp_program_bytes(program), prompt->ends ? "FINISHED" : "CONTINUE");
    form_handoff(&json, session, transfer);
    if (session->verify) form_checksums(&json, program);
    form_begins(&json, transfer);
    form(&json, "}");
    transfer->state = DONE;
    await_answer(session, KVP_DONE, id, transfer->sequence, frame_of(KVP_DONE, json.text));
    free(json.text);
}
static void send_data(Session *session) { /* as much as credit allows, stream by stream */
    for (bool more = true; more;) {
        more = false;
        for (Transfer *transfer = session->sink->transfers; transfer; transfer = transfer->next) {
            if (transfer->state != STREAMING) continue;
            uint64_t size = transfer->packed.size - transfer->sent, most = MAX_DATA, credit = session->total - session->counted;
            if (session->max_body < MAX_DATA + 1024) most = session->max_body > 1024 ? session->max_body - 1024 : session->max_body / 2;
            size = size > most ? most : size;
            size = size > credit ? credit : size;
            if (!size) continue;
            Text json = {0};
            form(&json, "{\"session\": \"%llu\", \"sequence\": \"%llu\", \"offset\": \"%llu\", \"data\": \"", (unsigned long long)session->id,
                (unsigned long long)transfer->sequence, (unsigned long long)transfer->sent);
            form_hex(&json, transfer->packed.text + transfer->sent, size);
            bool last = transfer->sent + size == transfer->packed.size;
            form(&json, "\", \"last\": %s", last ? "true" : "false");
            if (!transfer->sent) form_begins(&json, transfer);
            form(&json, "}");
            notice(session, KVP_DATA, json.text);
            free(json.text);
            transfer->sent += size;
            session->counted += size;
            more = true;
            if (last) send_done(session, transfer);
        }
    }
}
static void go_on(Session *session, Transfer *transfer) { /* with what its prompt has become */
    Prompt *prompt = transfer->prompt;
    Block *outer_blocks = blocks;
    jmp_buf here, *outer = refused;
    if (transfer->state != RUNNING || !prompt) return;
    blocks = NULL;
    refused = &here;
    if (setjmp(here)) fail_as(session, transfer, 0);
    else {
        check_windows(session, transfer);
        if (prompt->finished) {
            check_finished(session, transfer);
            transfer->windows = get((transfer->grant_count + 1) * sizeof(kvp_value));
            for (size_t i = 0; i < transfer->grant_count; i++) {
                const kvp_value *grant = &transfer->grants[i];
                const Group *group = group_with(session->side, kvp_number(grant, KVP_GRANTS_GROUP));
                int result;
                kvp_window window = served(session, group, grant, held_since(session, group->id, prompt), &result);
                transfer->windows[i] = result ? *grant : cut_grants(grant, &window, get(grant->count * sizeof(kvp_value)));
            }
        }
        if (pool.shared) copy_rows(session, transfer);
        else if (prompt->finished) pack(session, transfer);
        if (prompt->finished && pool.shared) send_done(session, transfer);
        else if (prompt->finished) {
            transfer->state = STREAMING;
            if (!transfer->packed.size) send_done(session, transfer);
            else send_data(session);
        }
    }
    refused = outer;
    if (transfer->state == STREAMING) keep(&transfer->memory);
    else give_back();
    blocks = outer_blocks;
}

/* ---- Transfer ---- */

static void use_ticket(const Session *session, const Transfer *transfer) {
    Ticket *ticket = ticket_with(transfer->key);
    if (!ticket) {
        ticket = calloc(1, sizeof *ticket);
        if (!ticket) abort();
        *ticket = (Ticket){.next = tickets, .engine = copy_of(session->sink->engine, strlen(session->sink->engine)), .replica = session->sink->replica};
        memcpy(ticket->key, transfer->key, 16);
        ticket->ranks = calloc(session->boxes + 1, sizeof *ticket->ranks);
        for (size_t i = 0; i < session->boxes; i++)
            if (session->box[i].source == 0 && (!ticket->rank_count || ticket->ranks[ticket->rank_count - 1] != session->box[i].sink)) ticket->ranks[ticket->rank_count++] = session->box[i].sink;
        tickets = ticket;
    }
    for (size_t i = 0; i < ticket->count; i++)
        if (ticket->uses[i].session == session->id && ticket->uses[i].sequence == transfer->sequence) return;
    ticket->uses = realloc(ticket->uses, (ticket->count + 1) * sizeof *ticket->uses);
    if (!ticket->uses) abort();
    ticket->uses[ticket->count++] = (Use){session->id, transfer->sequence, session->rank, UNDER_WAY};
}
static void forget_use(const Session *session, const Transfer *transfer) { /* it was refused before it could use its ticket */
    Ticket *ticket = ticket_with(transfer->key);
    for (size_t i = 0; ticket && i < ticket->count; i++)
        if (ticket->uses[i].session == session->id && ticket->uses[i].sequence == transfer->sequence) {
            ticket->uses[i] = ticket->uses[--ticket->count];
            if (!ticket->count) forget_ticket(ticket);
            return;
        }
}
static void meet_prompt(Session *session, Transfer *transfer, Prompt *prompt, uint64_t answers) { /* the checks that need it; answers: id of the Transfer that is not accepted yet, or 0 */
    jmp_buf here, *outer = refused;
    static bool uses;
    uses = false;
    transfer->prompt = prompt;
    transfer->state = RUNNING;
    refused = &here;
    if (setjmp(here)) {
        if (!uses) forget_use(session, transfer);
        fail_as(session, transfer, answers);
        refused = outer;
        return;
    }
    if (prompt->given_up) deny("ABORTED", "", "given up", "asked for");
    if (memcmp(prompt->content, transfer->content, 32)) deny("CONTENT_MISMATCH", "content", "that of the ticket's prompt", "another");
    check_ticket(session, transfer->key, transfer->sequence);
    use_ticket(session, transfer);
    uses = true;
    check_windows(session, transfer);
    refused = outer;
    if (answers) accept(session, transfer, answers);
    go_on(session, transfer);
}
static void repeated(Session *session, Transfer *transfer, uint64_t request) { /* answered from the state of the transfer */
    if (transfer->failed.size) {
        Text json = {0};
        form_ids(&json, session, request, transfer->sequence);
        form(&json, "%s}", transfer->failed.text);
        notice(session, KVP_FAILED, json.text);
        free(json.text);
    } else accept(session, transfer, request);
}
static void check_sequence(const Session *session, const kvp_value *map) { /* 1 to 4 */
    uint64_t sequence = kvp_number(map, KVP_TRANSFER_SEQUENCE);
    const Transfer *known = transfer_of(session, sequence);
    if (known && known->aborted) deny("ABORTED", "sequence", "aborted", "asked for");
    if (sequence <= session->sink->low || known) deny("STALE_TRANSFER", "sequence", "a later one", "one that was asked for before");
    if (sequence - session->sink->low > MAX_TRANSFERS) deny("BUSY", "sequence", "64 transfers", "more");
    if (session->state != READY) deny("UNEXPECTED_MESSAGE", "", "memory that is registered", "Transfer");
}
static void check_transfer(const Session *session, const kvp_value *map, const char *key) { /* 5 to 10 */
    kvp_value grants = field(map, KVP_TRANSFER_GRANTS);
    const Ticket *ticket = ticket_with(key);
    bool served = ticket && ticket->replica == session->sink->replica && !strcmp(ticket->engine, session->sink->engine);
    if (draining && !served) deny("DRAINING", "", "going away", "a new ticket");
    check_agreement(session, map);
    check_groups(session, &grants);
    uint64_t all = 0;
    for (size_t i = 0; i < grants.count; i++) check_grant(session, &grants.items[i], i, &all);
    check_scale_windows(session, &grants);
    check_alias(session, &grants);
    if (ticket && ticket->over) deny("TICKET_USED", "ticket", "its transfers are over", "asked for");
}
static void hear_transfer(Session *session, const kvp_value *map) {
    uint64_t sequence = kvp_number(map, KVP_TRANSFER_SEQUENCE), request = kvp_number(map, KVP_TRANSFER_REQUEST);
    kvp_value ticket = field(map, KVP_TRANSFER_TICKET), content = field(map, KVP_TRANSFER_CONTENT), grants = field(map, KVP_TRANSFER_GRANTS);
    Transfer *known = transfer_of(session, sequence);
    if (known && !known->unseen && known->request == request) {
        repeated(session, known, request);
        return;
    }
    if (sequence > session->sequence) session->sequence = sequence;
    check_sequence(session, map);
    Transfer *transfer = new_transfer(session, sequence);
    transfer->request = request;
    memcpy(transfer->key, ticket.bytes, 16);
    memcpy(transfer->content, content.bytes, 32);
    jmp_buf here, *outer = refused;
    refused = &here;
    if (setjmp(here)) {
        refused = outer;
        fail_as(session, transfer, request);
        return;
    }
    check_transfer(session, map, transfer->key);
    transfer->grants = grants.items;
    transfer->grant_count = grants.count;
    Prompt *prompt = prompt_with(transfer->key);
    if (!prompt) check_ticket(session, transfer->key, sequence);
    refused = outer;
    if (prompt) meet_prompt(session, transfer, prompt, request);
    else {
        transfer->state = WAITING;
        transfer->until = now() + TICKET_WAIT;
        use_ticket(session, transfer);
        accept(session, transfer, request);
    }
    keep(&transfer->memory);
}

/* ---- answers, Abort, Credit, and what ends a session's transfers ---- */

static void done_ack(Session *session, const kvp_value *map) {
    Transfer *transfer = transfer_of(session, kvp_number(map, KVP_DONE_ACK_SEQUENCE));
    uint64_t request = kvp_number(map, KVP_DONE_ACK_REQUEST);
    if (!transfer) { /* late, or of a Failed that left no record */
        if (kvp_number(map, KVP_DONE_ACK_SEQUENCE) > session->sequence) deny("UNEXPECTED_MESSAGE", "sequence", "no Done", "DoneAck");
        return;
    }
    if (transfer->state < DONE && !transfer->unseen) deny("UNEXPECTED_MESSAGE", "sequence", "no Done", "DoneAck");
    if (transfer->state == DONE && drop_request(session, KVP_DONE, transfer, request)) {
        transfer->state = ENDED;
        mark_use(session, transfer, DELIVERED);
    } else if (transfer->state == FAILED_BY && (request == transfer->request || drop_request(session, KVP_FAILED, transfer, request))) transfer->state = ENDED;
    raise_mark(session);
}
static void refused_done(Session *session, uint64_t request) { /* an Error in its place */
    for (Transfer *each = session->sink->transfers; each; each = each->next)
        if (each->state == DONE && drop_request(session, KVP_DONE, each, request)) {
            each->state = ENDED;
            mark_use(session, each, LOST);
            raise_mark(session);
            return;
        }
}
static void abort_transfer(Session *session, const kvp_value *map) {
    uint64_t sequence = kvp_number(map, KVP_ABORT_SEQUENCE);
    Transfer *transfer = transfer_of(session, sequence);
    bool proven = true;
    if (session->state != READY) deny("UNEXPECTED_MESSAGE", "sequence", "no transfers yet", "Abort");
    if (!transfer && sequence > session->sink->low) {
        proven = sequence - session->sink->low <= MAX_TRANSFERS;
        if (proven) transfer = new_transfer(session, sequence);
        if (proven) transfer->unseen = transfer->aborted = true;
    } else if (transfer && transfer->state != ENDED) {
        drop_request(session, KVP_DONE, transfer, 0);
        drop_request(session, KVP_FAILED, transfer, 0);
        transfer->state = ENDED; /* copies are made within one turn: none is under way */
        transfer->aborted = true;
        free(transfer->packed.text);
        transfer->packed = (Text){0};
        if (!transfer->failed.size) {
            code = "ABORTED";
            where.size = 0;
            add(&where, "sequence", 8);
            form_refusal(&transfer->failed);
        }
    }
    Text json = {0};
    form_ids(&json, session, kvp_number(map, KVP_ABORT_REQUEST), sequence);
    form(&json, ", \"proof\": \"%s\"}", proven ? "PROVEN" : "UNPROVABLE");
    notice(session, KVP_DRAINED, json.text);
    free(json.text);
    raise_mark(session);
}
static void credit(Session *session, const kvp_value *map) {
    kvp_value total = field(map, KVP_CREDIT_TOTAL);
    if (pool.shared || session->state != READY || kvp_number(map, KVP_CREDIT_KIND) != 2) deny("UNEXPECTED_MESSAGE", "", "no credit of this kind", "Credit");
    if (total.number < session->total || total.number > session->counted + MAX_CREDIT) deny("CREDIT", "total", "no less than before, and no more than may be", "another");
    session->total = total.number;
    send_data(session);
}
static void resumed(Session *session) { /* over another connection: streams are cut, and counts begin again */
    session->total = session->counted = 0;
    for (Transfer *each = session->sink->transfers; each; each = each->next)
        if (each->state == STREAMING && each->sent) fail(session, each, "PEER_LOST", "");
    for (Request *each = session->requests; each; each = each->next) send_frame(session, &each->frame);
}
static void lost(Session *session) {
    for (Transfer *each = session->sink->transfers, *next; each; each = next) {
        next = each->next;
        if (!each->unseen) mark_use(session, each, LOST);
        free_transfer(each);
    }
    session->sink->transfers = NULL;
}
