/* Fetches of a sink: Transfer, Data, Done, Failed, Abort, and when items are free; from transfers.md, lowering.md and handoff.md. Included by sink.c. */
#include "hear.c"


/* ---- fetches ---- */

enum { UNSENT, ASKED, ACCEPTED, DONE, FAILED_BY, ABORTING, PROVEN, UNPROVABLE };
typedef struct { Session *session; uint64_t session_id, sequence, unpacked, length; int state; bool last; Block *memory; uint64_t (*move)[MOVE]; size_t moves; Text checksums; } Attempt;
typedef struct Fetch {
    struct Fetch *next;
    char *id, key[33];
    Source *source;
    uint64_t *tokens, count, first;
    double deadline, over; /* ENDLESS: when it is given up, where a source has not accepted it, and where all have */
    unsigned items[GROUPS][ITEMS];
    int held[GROUPS];
    Attempt *attempts; /* one of each routed rank */
    size_t attempt_count;
    const char *lost; /* NULL while it is not */
    bool arrived, finished;
    Text handoff[GROUPS];
} Fetch;
static Fetch *fetches;

static bool is_free(const Fetch *fetch) { /* KVP-END-REUSE */
    for (size_t i = 0; i < fetch->attempt_count; i++) {
        int state = fetch->attempts[i].state;
        if (state == UNSENT || state == DONE || state == PROVEN || ((state == ABORTING || state == UNPROVABLE) && !pool.shared)) continue;
        if (!fetch->attempts[i].session || has_writer(fetch->attempts[i].session)) return false;
    }
    return true; /* inline, nobody but this process writes: what it unpacks no more is free */
}
static double given_up_at(const Fetch *fetch) { /* KVP-TRN-ENDLESS */
    for (size_t i = 0; i < fetch->attempt_count; i++)
        if (fetch->attempts[i].state < ACCEPTED) return fetch->deadline;
    return fetch->attempt_count ? fetch->over : fetch->deadline;
}
static bool is_settled(const Fetch *fetch) { /* whether no source rank that can still be heard owes an answer to an Abort */
    for (size_t i = 0; i < fetch->attempt_count; i++)
        if (fetch->attempts[i].state == ABORTING && fetch->attempts[i].session && fetch->attempts[i].session->state != CLOSED) return false;
    return true;
}
static void ask_for_proof(Attempt *attempt, const char *reason) {
    Text json = {0};
    uint64_t now_id = attempt->session->id;
    form(&json, ", \"sequence\": \"%llu\", \"reason\": \"%s\"", (unsigned long long)attempt->sequence, reason);
    attempt->state = ABORTING;
    attempt->session->id = attempt->session_id;
    ask(attempt->session, L_Abort, attempt->sequence, json.text);
    attempt->session->id = now_id;
    free(json.text);
}
static void give_up(Fetch *fetch, const char *why, const char *reason) { /* and tell every routed rank whose good Done is missing (KVP-END-FAILED) */
    if (fetch->lost || fetch->arrived) return;
    fetch->lost = why;
    for (size_t i = 0; i < fetch->attempt_count; i++) {
        Attempt *attempt = &fetch->attempts[i];
        if (attempt->state == UNSENT || attempt->state == DONE || !attempt->session) continue;
        for (Request **each = &attempt->session->requests; *each;) {
            Request *found = *each;
            if (found->kind == L_Transfer && found->sequence == attempt->sequence) {
                *each = found->next;
                free(found->frame.text);
                free(found);
            } else each = &found->next;
        }
        ask_for_proof(attempt, reason);
    }
}
static void lost(Session *session, const char *why) {
    for (Fetch *fetch = fetches; fetch; fetch = fetch->next) {
        bool concerned = fetch->source == session->source && !fetch->attempt_count;
        for (size_t i = 0; i < fetch->attempt_count; i++) {
            Attempt *attempt = &fetch->attempts[i];
            concerned |= attempt->session == session && attempt->state != DONE;
            if (attempt->session == session && attempt->state == UNPROVABLE) ask_for_proof(attempt, "its session has ended"); /* KVP-END-LATE */
        }
        if (concerned) give_up(fetch, code_named(why), why);
    }
}
static void form_grants(Text *text, const Fetch *fetch, const Session *session) { /* a window for each routed group, ascending */
    bool more = false;
    uint64_t before = UINT64_MAX;
    form(text, "[");
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t group = session->box[i][2];
        if (!routed(session, i) || group == before) continue;
        before = group;
        const Cache *cache = &pool.caches[group];
        uint64_t rows = (uint64_t)cache->rows, first = fetch->first, from = 0;
        if (!strcmp(cache->kind, "RING") && fetch->count > rows && first < fetch->count - rows) first = fetch->count - rows;
        uint64_t count = has_memory(cache) ? fetch->count - first : 0, valid = has_memory(cache) ? fetch->count : 0;
        if (!has_memory(cache)) first = 0;
        form(text, "%s{\"group\": \"%llu\", \"first\": \"%llu\", \"count\": \"%llu\", \"valid\": \"%llu\"", more ? ", " : "", (unsigned long long)group, (unsigned long long)first, (unsigned long long)count, (unsigned long long)valid);
        more = true;
        if (has_memory(cache)) {
            if (!strcmp(cache->kind, "PAGE")) from = count ? first / rows : (uint64_t)fetch->held[group];
            form(text, ", \"items\": [");
            for (uint64_t k = from; k < (uint64_t)fetch->held[group]; k++) form(text, "%s\"%u\"", k > from ? ", " : "", fetch->items[group][k]);
            form(text, "]");
        }
        if (!strcmp(cache->kind, "SLOT")) form(text, ", \"state_after\": \"%llu\"", (unsigned long long)fetch->count);
        form(text, "}");
    }
    form(text, "]");
}
static void lower_attempt(Attempt *attempt, const char *grants) { /* what of the memory is to be filled, in the order of the packed stream */
    const Session *session = attempt->session;
    reading = grants;
    End ends[2] = {{.side = session->side, .rank = session->rank}, me.end};
    ends[1].windows = taken_list(L_Grants, json_here(), &ends[1].window_count);
    attempt->moves = lower_boxes(ends, session->box, session->boxes);
    attempt->move = get((attempt->moves + 1) * sizeof *attempt->move);
    if (attempt->moves) memcpy(attempt->move, moves.text, attempt->moves * sizeof *attempt->move);
    if (attempt->moves) qsort(attempt->move, attempt->moves, sizeof *attempt->move, by_coordinate);
    for (size_t i = 0; i < attempt->moves; i++) attempt->length += attempt->move[i][LENGTH];
    keep(&attempt->memory);
}
static bool has_room(const Session *session) { /* whether the next sequence is within max_transfers of the low-water mark (KVP-TRN-SEQUENCE) */
    uint64_t low = session->sequence;
    for (const Fetch *fetch = fetches; fetch; fetch = fetch->next)
        for (size_t i = 0; i < fetch->attempt_count; i++) {
            const Attempt *each = &fetch->attempts[i];
            bool under_way = each->session == session && (each->state == ASKED || each->state == ACCEPTED || each->state == ABORTING);
            if (under_way && each->sequence <= low) low = each->sequence - 1;
        }
    return session->sequence - low < session->max_transfers;
}
static void start(Fetch *fetch) { /* once all routed ranks are ready and state one Description */
    Session *some = fetch->source->sessions;
    while (some && some->state < DESCRIBED) some = some->next;
    if (!some || some->state == CLOSED || fetch->attempt_count || fetch->lost) return;
    uint64_t ranks[64], count = 0;
    for (size_t i = 0; i < some->boxes; i++) {
        if (some->box[i][1] != 0 || (count && ranks[count - 1] == some->box[i][0])) continue;
        Session *session = session_of(fetch->source, some->box[i][0]);
        if (count == 64 || !session || session->state != READY || memcmp(session->digest, some->digest, 32) || !has_room(session)) return;
        if (now() > session->heard + 2 * SILENCE) return; /* KVP-SES-SUSPECT */
        ranks[count++] = some->box[i][0];
    }
    fetch->attempts = calloc(count + 1, sizeof *fetch->attempts);
    fetch->attempt_count = count;
    for (uint64_t n = 0; n < count; n++) {
        Attempt *attempt = &fetch->attempts[n];
        Session *session = session_of(fetch->source, ranks[n]);
        *attempt = (Attempt){.session = session, .session_id = session->id, .sequence = ++session->sequence, .state = ASKED};
        Text json = {0}, grants = {0};
        char content[32];
        form_grants(&grants, fetch, session);
        lower_attempt(attempt, grants.text);
        form(&json, ", \"sequence\": \"%llu\", \"ticket\": \"%s\", \"content\": \"", (unsigned long long)attempt->sequence, fetch->key);
        content_digest(content, fetch->tokens, fetch->count);
        form_hex(&json, content, 32);
        form(&json, "\", \"source_version\": \"%llu\", \"sink_version\": \"1\", \"epoch\": \"1\", \"grants\": %s, \"writers\": [", (unsigned long long)session->version, grants.text);
        for (uint64_t k = 0; k < count; k++) form(&json, "%s\"%llu\"", k ? ", " : "", (unsigned long long)ranks[k]);
        form(&json, "]");
        ask(session, L_Transfer, attempt->sequence, json.text);
        free(json.text);
        free(grants.text);
    }
}
static void became_ready(Source *source) {
    for (Fetch *each = fetches; each; each = each->next)
        if (each->source == source) start(each);
}
static Attempt *attempt_of(const Session *session, uint64_t sequence, Fetch **of) {
    for (Fetch *fetch = fetches; fetch; fetch = fetch->next)
        for (size_t i = 0; i < fetch->attempt_count; i++)
            if (fetch->attempts[i].session == session && fetch->attempts[i].sequence == sequence) {
                *of = fetch;
                return &fetch->attempts[i];
            }
    return NULL;
}

/* ---- messages of transfers ---- */

static void grant_credit(Session *session) {
    if (session->total - session->counted > WINDOW / 2) return;
    Text json = {0};
    session->total = session->counted + WINDOW;
    form(&json, "{\"session\": \"%llu\", \"kind\": \"INLINE\", \"total\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)session->total);
    notice(session, L_Credit, json.text);
    free(json.text);
}
static void acknowledge(Session *session, uint64_t request, uint64_t sequence) {
    if (session->state == CLOSED) return; /* proof is heard, and not answered (KVP-SES-OTHER) */
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"sequence\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)request, (unsigned long long)sequence);
    notice(session, L_DoneAck, json.text);
    free(json.text);
}
static bool verified(const Attempt *attempt, const Node *checksums) { /* the sum of each group that moved a byte, over this memory (KVP-VERIFY-SINK) */
    for (int g = 0; g < pool.count; g++) {
        uint64_t sum = 0;
        bool moved = false;
        for (size_t i = 0; i < attempt->moves; i++) {
            const uint64_t *m = attempt->move[i], part = mixed((m[MODEL] << 48) + (m[LAYER] << 16) + m[PART]);
            if (m[GROUP] != (uint64_t)g) continue;
            moved = true;
            for (uint64_t n = 0; n < m[LENGTH]; n++) sum += pool.bytes[m[TO_AT] + n] * mixed(m[GLOBAL] + part) * mixed(m[BYTE] + n);
        }
        size_t i = 0;
        while (i < checksums->count && number(L_Checksum, &checksums->items[i], "group") != (uint64_t)g) i++;
        if (moved && (i == checksums->count || number(L_Checksum, &checksums->items[i], "value") != sum)) return false;
    }
    return true;
}
static void check_done(const Session *session, const Node *map) {
    if (number(L_Done, map, "writer") != session->rank) deny("WRONG_PEER", "writer", "the rank of this session", "another");
    Node groups = field(L_Done, map, "groups"), handoff = field(L_Done, map, "handoff");
    size_t n = 0, h = 0;
    uint64_t before = UINT64_MAX;
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t group = session->box[i][2];
        if (!routed(session, i) || group == before) continue;
        before = group;
        if (n >= groups.count || groups.numbers[n++] != group) deny("WRONG_PEER", "groups", "the routed groups", "others");
    }
    if (n != groups.count) deny("WRONG_PEER", "groups", "the routed groups", "more");
    before = UINT64_MAX;
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t group = session->box[i][2], size = 0;
        if (!routed(session, i) || group == before || has_memory(&pool.caches[group])) continue;
        before = group;
        for (size_t k = i; k < session->boxes && routed(session, k) && session->box[k][2] == group; k++) size += session->box[k][8] - session->box[k][7];
        if (h >= handoff.count || number(L_HandOff, &handoff.items[h], "group") != group) deny("WRONG_PEER", "handoff", "the routed hand-off groups", "others");
        if (field(L_HandOff, &handoff.items[h++], "data").count != size) deny("OUT_OF_RANGE", "handoff", "the bytes of the routed parts", "another number");
    }
    if (h != handoff.count) deny("WRONG_PEER", "handoff", "the routed hand-off groups", "more");
    if (field(L_Done, map, "begins").count) deny("BAD_GRANT", "begins", "no window was asked for as late", "a late one");
}
static void done(Session *session, Fetch *fetch, Attempt *attempt, const Node *map) {
    uint64_t request = number(L_Done, map, "request");
    if (attempt->state == ASKED || attempt->state == ACCEPTED) {
        check_done(session, map);
        if (!pool.shared && attempt->unpacked < attempt->length) deny("UNEXPECTED_MESSAGE", "sequence", "the end of the stream first", "Done"); /* KVP-STG-EARLY */
        Node handoff = field(L_Done, map, "handoff"), checksums = field(L_Done, map, "checksums");
        for (size_t i = 0; i < handoff.count; i++) {
            Node bytes = field(L_HandOff, &handoff.items[i], "data");
            Text *held = &fetch->handoff[number(L_HandOff, &handoff.items[i], "group")];
            held->size = 0;
            add(held, bytes.bytes, bytes.count);
        }
        attempt->state = DONE;
        fetch->finished = number(L_Done, map, "outcome") == 2;
        acknowledge(session, request, attempt->sequence);
        if (session->verify && !verified(attempt, &checksums)) {
            give_up(fetch, "VERIFY_FAILED", "the bytes differ");
            return;
        }
        for (size_t i = 0; i < fetch->attempt_count; i++)
            if (fetch->attempts[i].state != DONE) return;
        fetch->arrived = !fetch->lost;
        return;
    }
    if (attempt->state == ABORTING || attempt->state == UNPROVABLE) { /* it has crossed an Abort: proof all the same */
        check_done(session, map);
        attempt->state = PROVEN;
    }
    acknowledge(session, request, attempt->sequence);
}
static void failed(Session *session, Fetch *fetch, Attempt *attempt, const Node *map) {
    acknowledge(session, number(L_Failed, map, "request"), attempt->sequence);
    const char *name = name_of(&ENUMS[E_ErrorCode], number(L_Failed, map, "code"));
    if (attempt->state == ASKED || attempt->state == ACCEPTED) {
        attempt->state = FAILED_BY;
        give_up(fetch, name ? name : "INTERNAL", "a source rank has failed"); /* KVP-ERR-UNKNOWN */
    }
}
static void answered_by_error(Session *session, uint64_t request, const char *name) { /* no other answer will come (KVP-END-FAILED) */
    for (Request *each = session->requests; each; each = each->next) {
        if (each->id != request || each->kind != L_Transfer) continue;
        Fetch *fetch = NULL;
        Attempt *attempt = attempt_of(session, each->sequence, &fetch);
        if (attempt) give_up(fetch, code_named(name), "its Transfer was refused");
        return;
    }
}
static void unpack(Attempt *attempt, const char *bytes, uint64_t size) { /* the next of the stream */
    uint64_t begin = 0;
    for (size_t i = 0; i < attempt->moves && size; i++) {
        const uint64_t *m = attempt->move[i];
        if (attempt->unpacked < begin + m[LENGTH]) {
            uint64_t skip = attempt->unpacked - begin, n = m[LENGTH] - skip < size ? m[LENGTH] - skip : size;
            memcpy(pool.bytes + m[TO_AT] + skip, bytes, n);
            attempt->unpacked += n;
            bytes += n;
            size -= n;
        }
        begin += m[LENGTH];
    }
}
static bool count_data(Session *session, uint64_t bytes) { /* whatever becomes of it (KVP-INL-COUNT), but for what is beyond the total */
    if (bytes > session->total - session->counted) return false;
    session->counted += bytes;
    grant_credit(session);
    return true;
}
static void take_data(Session *session, Attempt *attempt, const Node *map) {
    Node bytes = field(L_Data, map, "data");
    uint64_t offset = number(L_Data, map, "offset");
    bool last = number(L_Data, map, "last"), beyond = !count_data(session, bytes.count);
    if (attempt->state == ABORTING) return; /* dropped */
    if (attempt->state != ASKED && attempt->state != ACCEPTED) deny("UNEXPECTED_MESSAGE", "", "nothing of a transfer that is over", "Data");
    if (beyond) deny("CREDIT", "data", "no more than the total", "more");
    if (offset != attempt->unpacked || bytes.count > attempt->length - attempt->unpacked) deny("OUT_OF_RANGE", "offset", "the next bytes of the stream", "others");
    if (last != (offset + bytes.count == attempt->length)) deny("FIELD_CONFLICT", "last", "true at the end of the stream, and there alone", last ? "true" : "false");
    if (field(L_Data, map, "begins").count) deny("BAD_GRANT", "begins", "no window was asked for as late", "a late one");
    unpack(attempt, bytes.bytes, bytes.count);
}
static bool hear_transfer(Session *session, const Layout *layout, const Node *map) { /* false where there is no row for it */
    int kind = (int)(layout - LAYOUTS);
    if (kind != L_Accepted && kind != L_Done && kind != L_Failed && kind != L_Drained && (kind != L_Data || pool.shared)) return false;
    Fetch *fetch = NULL;
    Attempt *attempt = attempt_of(session, number(kind, map, "sequence"), &fetch);
    Node request = map->items[1];
    if (!attempt) {
        bool past = number(kind, map, "sequence") <= session->sequence;
        if (past && (kind == L_Done || kind == L_Failed)) acknowledge(session, request.number, number(kind, map, "sequence")); /* of a fetch that is over */
        if (past && kind == L_Data) count_data(session, field(L_Data, map, "data").count);
        return past && kind != L_Data;
    }
    if (kind == L_Accepted) {
        if (answered(session, &request, L_Transfer) && attempt->state == ASKED) attempt->state = ACCEPTED;
    } else if (kind == L_Done) {
        answered(session, &request, L_Transfer);
        done(session, fetch, attempt, map);
    } else if (kind == L_Failed) {
        if (attempt->state == DONE) return false;
        answered(session, &request, L_Transfer);
        failed(session, fetch, attempt, map);
    } else if (kind == L_Drained) {
        bool due = answered(session, &request, L_Abort), proven = number(L_Drained, map, "proof") == 1;
        if (!due && session->state != CLOSED && attempt->state != PROVEN && attempt->state != UNPROVABLE) return false; /* no Abort has asked for it */
        if (session->state == CLOSED && proven) { /* whichever Abort it answers */
            attempt->state = PROVEN;
            for (Request *each = session->requests; each; each = each->next)
                if (each->kind == L_Abort && each->sequence == attempt->sequence) each->until = each->again = 1e18;
        }
        if (attempt->state == ABORTING && due) attempt->state = proven ? PROVEN : UNPROVABLE;
        if (attempt->state == UNPROVABLE && proven) attempt->state = PROVEN; /* it counts whenever it arrives (KVP-SES-ANSWERED) */
    } else take_data(session, attempt, map);
    return true;
}
static void refused_transfer(Session *session, int kind, const Node *map) { /* what was refused costs its transfer */
    Fetch *fetch = NULL;
    Attempt *attempt = kind == L_Done || kind == L_Data ? attempt_of(session, number(kind, map, "sequence"), &fetch) : NULL;
    if (attempt && attempt->state != DONE) give_up(fetch, code_named(code), "it was refused");
}
