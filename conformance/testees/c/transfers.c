/* Fetches of a sink: Transfer, Data, Done, Failed, Abort, and when items are free; from transfers.md, lowering.md and handoff.md. Included by sink.c. */
#include "hear.c"


/* ---- fetches ---- */

enum { UNSENT, ASKED, ACCEPTED, DONE, FAILED_BY, ABORTING, PROVEN, UNPROVABLE };
typedef struct { Session *session; uint64_t session_id, sequence, unpacked, length; int state; Block *memory; const kvp_program *program; } Attempt;
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
    ask(attempt->session, KVP_ABORT, attempt->sequence, json.text);
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
            if (found->kind == KVP_TRANSFER && found->sequence == attempt->sequence) {
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
        uint64_t group = session->box[i].group;
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
    const End source = {.side = session->side, .rank = session->rank}; /* whose memory nobody here knows */
    End sink = me.end;
    sink.windows = list_of_json(KVP_GRANTS, grants);
    attempt->program = lowered(session->plan, &source, &sink, NULL, 0);
    attempt->length = kvp_program_bytes(attempt->program);
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
        if (some->box[i].sink != 0 || (count && ranks[count - 1] == some->box[i].source)) continue;
        Session *session = session_of(fetch->source, some->box[i].source);
        if (count == 64 || !session || session->state != READY || memcmp(session->digest, some->digest, 32) || !has_room(session)) return;
        if (now() > session->heard + 2 * SILENCE) return; /* KVP-SES-SUSPECT */
        ranks[count++] = some->box[i].source;
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
        ask(session, KVP_TRANSFER, attempt->sequence, json.text);
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
    notice(session, KVP_CREDIT, json.text);
    free(json.text);
}
static void acknowledge(Session *session, uint64_t request, uint64_t sequence) {
    if (session->state == CLOSED) return; /* proof is heard, and not answered (KVP-SES-OTHER) */
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"sequence\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)request, (unsigned long long)sequence);
    notice(session, KVP_DONE_ACK, json.text);
    free(json.text);
}
static bool verified(const Attempt *attempt, const kvp_value *checksums) { /* the sum of each group that moved a byte, over this memory (KVP-VERIFY-SINK) */
    kvp_sum sums[GROUPS];
    size_t count;
    check(kvp_program_sums(attempt->program, true, pool_place, NULL, sums, GROUPS, &count, &refusal));
    for (size_t k = 0; k < count; k++) {
        size_t i = 0;
        while (i < checksums->count && kvp_number(&checksums->items[i], KVP_CHECKSUM_GROUP) != sums[k].group) i++;
        if (i == checksums->count || kvp_number(&checksums->items[i], KVP_CHECKSUM_VALUE) != sums[k].value) return false;
    }
    return true;
}
static void check_done(const Session *session, const kvp_value *map) {
    if (kvp_number(map, KVP_DONE_WRITER) != session->rank) deny("WRONG_PEER", "writer", "the rank of this session", "another");
    kvp_value groups = field(map, KVP_DONE_GROUPS), handoff = field(map, KVP_DONE_HANDOFF);
    size_t n = 0, h = 0;
    uint64_t before = UINT64_MAX;
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t group = session->box[i].group;
        if (!routed(session, i) || group == before) continue;
        before = group;
        if (n >= groups.count || groups.numbers[n++] != group) deny("WRONG_PEER", "groups", "the routed groups", "others");
    }
    if (n != groups.count) deny("WRONG_PEER", "groups", "the routed groups", "more");
    before = UINT64_MAX;
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t group = session->box[i].group, size = 0;
        if (!routed(session, i) || group == before || has_memory(&pool.caches[group])) continue;
        before = group;
        for (size_t k = i; k < session->boxes && routed(session, k) && session->box[k].group == group; k++) size += session->box[k].hi - session->box[k].lo;
        if (h >= handoff.count || kvp_number(&handoff.items[h], KVP_HAND_OFF_GROUP) != group) deny("WRONG_PEER", "handoff", "the routed hand-off groups", "others");
        if (field(&handoff.items[h++], KVP_HAND_OFF_DATA).count != size) deny("OUT_OF_RANGE", "handoff", "the bytes of the routed parts", "another number");
    }
    if (h != handoff.count) deny("WRONG_PEER", "handoff", "the routed hand-off groups", "more");
    if (field(map, KVP_DONE_BEGINS).count) deny("BAD_GRANT", "begins", "no window was asked for as late", "a late one");
}
static void done(Session *session, Fetch *fetch, Attempt *attempt, const kvp_value *map) {
    uint64_t request = kvp_number(map, KVP_DONE_REQUEST);
    if (attempt->state == ASKED || attempt->state == ACCEPTED) {
        check_done(session, map);
        if (!pool.shared && attempt->unpacked < attempt->length) deny("UNEXPECTED_MESSAGE", "sequence", "the end of the stream first", "Done"); /* KVP-STG-EARLY */
        kvp_value handoff = field(map, KVP_DONE_HANDOFF), checksums = field(map, KVP_DONE_CHECKSUMS);
        for (size_t i = 0; i < handoff.count; i++) {
            kvp_value bytes = field(&handoff.items[i], KVP_HAND_OFF_DATA);
            Text *held = &fetch->handoff[kvp_number(&handoff.items[i], KVP_HAND_OFF_GROUP)];
            held->size = 0;
            add(held, bytes.bytes, bytes.count);
        }
        attempt->state = DONE;
        fetch->finished = kvp_number(map, KVP_DONE_OUTCOME) == 2;
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
static void failed(Session *session, Fetch *fetch, Attempt *attempt, const kvp_value *map) {
    acknowledge(session, kvp_number(map, KVP_FAILED_REQUEST), attempt->sequence);
    const char *name = kvp_value_name(KVP_ENUM_ERROR_CODE, kvp_number(map, KVP_FAILED_CODE));
    if (attempt->state == ASKED || attempt->state == ACCEPTED) {
        attempt->state = FAILED_BY;
        give_up(fetch, name ? name : "INTERNAL", "a source rank has failed"); /* KVP-ERR-UNKNOWN */
    }
}
static void answered_by_error(Session *session, uint64_t request, const char *name) { /* no other answer will come (KVP-END-FAILED) */
    for (Request *each = session->requests; each; each = each->next) {
        if (each->id != request || each->kind != KVP_TRANSFER) continue;
        Fetch *fetch = NULL;
        Attempt *attempt = attempt_of(session, each->sequence, &fetch);
        if (attempt) give_up(fetch, code_named(name), "its Transfer was refused");
        return;
    }
}
static bool count_data(Session *session, uint64_t bytes) { /* whatever becomes of it (KVP-INL-COUNT), but for what is beyond the total */
    if (bytes > session->total - session->counted) return false;
    session->counted += bytes;
    grant_credit(session);
    return true;
}
static void take_data(Session *session, Attempt *attempt, const kvp_value *map) {
    kvp_value bytes = field(map, KVP_DATA_DATA);
    uint64_t offset = kvp_number(map, KVP_DATA_OFFSET);
    bool last = kvp_number(map, KVP_DATA_LAST), beyond = !count_data(session, bytes.count);
    if (attempt->state == ABORTING) return; /* dropped */
    if (attempt->state != ASKED && attempt->state != ACCEPTED) deny("UNEXPECTED_MESSAGE", "", "nothing of a transfer that is over", "Data");
    if (beyond) deny("CREDIT", "data", "no more than the total", "more");
    if (offset != attempt->unpacked || bytes.count > attempt->length - attempt->unpacked) deny("OUT_OF_RANGE", "offset", "the next bytes of the stream", "others");
    if (last != (offset + bytes.count == attempt->length)) deny("FIELD_CONFLICT", "last", "true at the end of the stream, and there alone", last ? "true" : "false");
    if (field(map, KVP_DATA_BEGINS).count) deny("BAD_GRANT", "begins", "no window was asked for as late", "a late one");
    check(kvp_program_unpack(attempt->program, offset, bytes.bytes, bytes.count, pool_place, NULL, &refusal));
    attempt->unpacked += bytes.count;
}
static bool hear_transfer(Session *session, int kind, const kvp_value *map) { /* false where there is no row for it */
    if (kind != KVP_ACCEPTED && kind != KVP_DONE && kind != KVP_FAILED && kind != KVP_DRAINED && (kind != KVP_DATA || pool.shared)) return false;
    Fetch *fetch = NULL;
    Attempt *attempt = attempt_of(session, kvp_number(map, KVP_DONE_SEQUENCE), &fetch);
    kvp_value request = request_of(map);
    if (!attempt) {
        bool past = kvp_number(map, KVP_DONE_SEQUENCE) <= session->sequence;
        if (past && (kind == KVP_DONE || kind == KVP_FAILED)) acknowledge(session, request.number, kvp_number(map, KVP_DONE_SEQUENCE)); /* of a fetch that is over */
        if (past && kind == KVP_DATA) count_data(session, field(map, KVP_DATA_DATA).count);
        return past && kind != KVP_DATA;
    }
    if (kind == KVP_ACCEPTED) {
        if (answered(session, &request, KVP_TRANSFER) && attempt->state == ASKED) attempt->state = ACCEPTED;
    } else if (kind == KVP_DONE) {
        answered(session, &request, KVP_TRANSFER);
        done(session, fetch, attempt, map);
    } else if (kind == KVP_FAILED) {
        if (attempt->state == DONE) return false;
        answered(session, &request, KVP_TRANSFER);
        failed(session, fetch, attempt, map);
    } else if (kind == KVP_DRAINED) {
        bool due = answered(session, &request, KVP_ABORT), proven = kvp_number(map, KVP_DRAINED_PROOF) == 1;
        if (!due && session->state != CLOSED && attempt->state != PROVEN && attempt->state != UNPROVABLE) return false; /* no Abort has asked for it */
        if (session->state == CLOSED && proven) { /* whichever Abort it answers */
            attempt->state = PROVEN;
            for (Request *each = session->requests; each; each = each->next)
                if (each->kind == KVP_ABORT && each->sequence == attempt->sequence) each->until = each->again = 1e18;
        }
        if (attempt->state == ABORTING && due) attempt->state = proven ? PROVEN : UNPROVABLE;
        if (attempt->state == UNPROVABLE && proven) attempt->state = PROVEN; /* it counts whenever it arrives (KVP-SES-ANSWERED) */
    } else take_data(session, attempt, map);
    return true;
}
static void refused_transfer(Session *session, int kind, const kvp_value *map) { /* what was refused costs its transfer */
    Fetch *fetch = NULL;
    Attempt *attempt = kind == KVP_DONE || kind == KVP_DATA ? attempt_of(session, kvp_number(map, KVP_DONE_SEQUENCE), &fetch) : NULL;
    if (attempt && attempt->state != DONE) give_up(fetch, code_named(code), "it was refused");
}
