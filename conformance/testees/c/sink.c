/* A kvproto sink in C11: it fetches caches over shm and inline, as a decode engine does. libzmq is all that it needs; made from spec/v1 alone.
 *
 *     gcc -std=c11 -O2 -o sink sink.c -lzmq
 *     kvproto-conformance run --role sink --level L3 --live-sink ./sink -- ./sink
 *
 * It answers the questions of a testee at L2 (lower.c), and is the adapter of a live engine (testee.md). One rank, one thread. What it leaves out: keys, epochs, pull, staging,
 * intent, and to go on with a session over another connection; it opens another. In order: fetches, messages of transfers, what the suite asks, the loop. */
#include "session.c"

/* ---- fetches ---- */

enum { UNSENT, ASKED, ACCEPTED, DONE, FAILED_BY, ABORTING, PROVEN, UNPROVABLE };
typedef struct { Session *session; uint64_t session_id, sequence, unpacked, length; int state; bool last; Block *memory; uint64_t (*move)[MOVE]; size_t moves; Text checksums; } Attempt;
typedef struct Fetch {
    struct Fetch *next;
    char *id, key[33];
    Source *source;
    uint64_t *tokens, count, first;
    double over; /* ENDLESS: when it is given up */
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
        if (state != UNSENT && state != DONE && state != PROVEN && !(state == ABORTING && !pool.shared) && !(state == UNPROVABLE && !pool.shared)) return false;
    }
    return true; /* inline, nobody but this process writes: what it unpacks no more is free */
}
static bool is_settled(const Fetch *fetch) { /* whether no source rank that can still be heard owes an answer to an Abort */
    for (size_t i = 0; i < fetch->attempt_count; i++)
        if (fetch->attempts[i].state == ABORTING && fetch->attempts[i].session && fetch->attempts[i].session->state != CLOSED) return false;
    return true;
}
static void give_up(Fetch *fetch, const char *why, const char *reason) { /* and tell every routed rank whose good Done is missing (KVP-END-FAILED) */
    if (fetch->lost || fetch->arrived) return;
    fetch->lost = why;
    for (size_t i = 0; i < fetch->attempt_count; i++) {
        Attempt *attempt = &fetch->attempts[i];
        if (attempt->state == UNSENT || attempt->state == DONE || !attempt->session) continue;
        Text json = {0};
        form(&json, ", \"sequence\": \"%llu\", \"attempt\": \"1\", \"reason\": \"%s\"", (unsigned long long)attempt->sequence, reason);
        for (Request **each = &attempt->session->requests; *each;) {
            Request *found = *each;
            if (found->kind == L_Transfer && found->sequence == attempt->sequence) {
                *each = found->next;
                free(found->frame.text);
                free(found);
            } else each = &found->next;
        }
        attempt->state = ABORTING;
        uint64_t now_id = attempt->session->id;
        attempt->session->id = attempt->session_id;
        ask(attempt->session, L_Abort, attempt->sequence, json.text);
        attempt->session->id = now_id;
        free(json.text);
    }
}
static void lost(Session *session, const char *why) {
    for (Fetch *fetch = fetches; fetch; fetch = fetch->next) {
        bool concerned = fetch->source == session->source && !fetch->attempt_count;
        for (size_t i = 0; i < fetch->attempt_count; i++) concerned |= fetch->attempts[i].session == session && fetch->attempts[i].state != DONE;
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
static void form_content(Text *text, const Fetch *fetch) { /* the content digest */
    Text json = {0};
    char digest[32];
    form(&json, "{\"tokens\": [");
    for (uint64_t i = 0; i < fetch->count; i++) form(&json, "%s\"%llu\"", i ? ", " : "", (unsigned long long)fetch->tokens[i]);
    form(&json, "], \"adapter\": \"\", \"salts\": []}");
    reading = json.text;
    Node map = taken_map(&LAYOUTS[L_Content], json_here(), NULL);
    made.size = 0;
    put_map(&LAYOUTS[L_Content], &map);
    sha256(made.text, made.size, digest);
    form_hex(text, digest, 32);
    free(json.text);
}
static void start(Fetch *fetch) { /* once all routed ranks are ready and state one Description */
    Session *some = fetch->source->sessions;
    while (some && some->state < DESCRIBED) some = some->next;
    if (!some || some->state == CLOSED || fetch->attempt_count || fetch->lost) return;
    uint64_t ranks[64], count = 0;
    for (size_t i = 0; i < some->boxes; i++) {
        if (some->box[i][1] != 0 || (count && ranks[count - 1] == some->box[i][0])) continue;
        Session *session = session_of(fetch->source, some->box[i][0]);
        if (count == 64 || !session || session->state != READY || memcmp(session->digest, some->digest, 32)) return;
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
        form_grants(&grants, fetch, session);
        lower_attempt(attempt, grants.text);
        form(&json, ", \"sequence\": \"%llu\", \"attempt\": \"1\", \"ticket\": \"%s\", \"content\": \"", (unsigned long long)attempt->sequence, fetch->key);
        form_content(&json, fetch);
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
static Attempt *attempt_of(const Session *session, uint64_t sequence, uint64_t number, Fetch **of) {
    for (Fetch *fetch = fetches; fetch; fetch = fetch->next)
        for (size_t i = 0; i < fetch->attempt_count; i++)
            if (fetch->attempts[i].session == session && fetch->attempts[i].sequence == sequence && number == 1) {
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
static void acknowledge(Session *session, uint64_t request, uint64_t sequence, uint64_t attempt) {
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"sequence\": \"%llu\", \"attempt\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)request, (unsigned long long)sequence, (unsigned long long)attempt);
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
static void check_done(const Session *session, const Attempt *attempt, const Node *map) {
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
    if (!pool.shared && attempt->unpacked < attempt->length) deny("UNEXPECTED_MESSAGE", "", "the end of the stream first", "Done");
}
static void done(Session *session, Fetch *fetch, Attempt *attempt, const Node *map) {
    uint64_t request = number(L_Done, map, "request");
    if (attempt->state == ASKED || attempt->state == ACCEPTED) {
        check_done(session, attempt, map);
        Node handoff = field(L_Done, map, "handoff"), checksums = field(L_Done, map, "checksums");
        for (size_t i = 0; i < handoff.count; i++) {
            Node bytes = field(L_HandOff, &handoff.items[i], "data");
            Text *held = &fetch->handoff[number(L_HandOff, &handoff.items[i], "group")];
            held->size = 0;
            add(held, bytes.bytes, bytes.count);
        }
        attempt->state = DONE;
        fetch->finished = number(L_Done, map, "outcome") == 2;
        acknowledge(session, request, attempt->sequence, 1);
        if (session->verify && !verified(attempt, &checksums)) {
            give_up(fetch, "VERIFY_FAILED", "the bytes differ");
            return;
        }
        for (size_t i = 0; i < fetch->attempt_count; i++)
            if (fetch->attempts[i].state != DONE) return;
        fetch->arrived = !fetch->lost;
        return;
    }
    acknowledge(session, request, attempt->sequence, 1); /* again, or it has crossed an Abort: proof all the same */
    if (attempt->state == ABORTING || attempt->state == UNPROVABLE) attempt->state = PROVEN;
}
static void failed(Session *session, Fetch *fetch, Attempt *attempt, const Node *map) {
    acknowledge(session, number(L_Failed, map, "request"), attempt->sequence, 1);
    const char *name = name_of(&ENUMS[E_ErrorCode], number(L_Failed, map, "code"));
    if (attempt->state == ASKED || attempt->state == ACCEPTED) {
        attempt->state = FAILED_BY;
        give_up(fetch, name ? name : "INTERNAL", "a source rank has failed"); /* KVP-ERR-UNKNOWN */
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
static void take_data(Session *session, Attempt *attempt, const Node *map) {
    Node bytes = field(L_Data, map, "data");
    uint64_t offset = number(L_Data, map, "offset");
    bool last = number(L_Data, map, "last"), beyond = bytes.count > session->total - session->counted;
    if (!beyond) session->counted += bytes.count; /* KVP-INL-COUNT */
    if (!beyond) grant_credit(session);
    if (attempt->state == ABORTING || attempt->state == PROVEN || attempt->state == UNPROVABLE) return; /* dropped */
    if (attempt->state == DONE) deny("UNEXPECTED_MESSAGE", "", "nothing after Done", "Data");
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
    Attempt *attempt = attempt_of(session, number(kind, map, "sequence"), number(kind, map, "attempt"), &fetch);
    Node request = map->items[1];
    if (!attempt) {
        bool past = number(kind, map, "sequence") <= session->sequence && number(kind, map, "attempt") == 1;
        if (past && (kind == L_Done || kind == L_Failed)) acknowledge(session, request.number, number(kind, map, "sequence"), 1); /* of a fetch that is over */
        if (past && kind == L_Data) session->counted += field(L_Data, map, "data").count;
        return past;
    }
    if (kind == L_Accepted) {
        if (answered(session, &request, L_Transfer) && attempt->state == ASKED) attempt->state = ACCEPTED;
    } else if (kind == L_Done) {
        answered(session, &request, L_Transfer);
        done(session, fetch, attempt, map);
    } else if (kind == L_Failed) {
        answered(session, &request, L_Transfer);
        failed(session, fetch, attempt, map);
    } else if (kind == L_Drained) {
        if (answered(session, &request, L_Abort) && attempt->state == ABORTING) attempt->state = number(L_Drained, map, "proof") == 1 ? PROVEN : UNPROVABLE;
    } else take_data(session, attempt, map);
    return true;
}
static void refused_transfer(Session *session, int kind, const Node *map) { /* what was refused costs its transfer */
    Fetch *fetch = NULL;
    Attempt *attempt = kind == L_Done || kind == L_Data ? attempt_of(session, number(kind, map, "sequence"), number(kind, map, "attempt"), &fetch) : NULL;
    if (attempt && attempt->state != DONE) give_up(fetch, code_named(code), "it was refused");
}

/* ---- what the suite asks of a live engine ---- */

static Source *source_named(const char *name) {
    Source *each = sources;
    while (each && strcmp(each->name, name)) each = each->next;
    return each;
}
static Fetch *fetch_named(const Json *id) {
    Fetch *each = fetches;
    while (each && (!id || strcmp(each->id, id->text))) each = each->next;
    return each;
}
static void turn_once(double seconds, bool commands);
static void open_engine(const Json *question) {
    const Json *verify = member(question, "verify"), *transport = member(question, "transport");
    if (!open_pool(member(question, "world")->text, !strcmp(transport->text, "SHM"))) deny("NO_TRANSPORT", "world", "gqa, mla, hybrid", "another");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint32_t chance;
    random_bytes(&chance, sizeof chance);
    me.name = copy_of(member(question, "name")->text, member(question, "name")->size);
    me.incarnation = ((uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000) << 20 | (chance & 0xfffff);
    me.verify = !verify || verify->truth;
    Text json = {0}, columns = {0};
    form_geometry(&json);
    form_columns(&columns);
    reading = json.text;
    Node *map = get(sizeof *map);
    *map = taken_map(&LAYOUTS[L_Geometry], json_here(), NULL);
    me.side = side_of_map(map);
    made.size = 0;
    put_map(&LAYOUTS[L_Geometry], map);
    add(&me.geometry, made.text, made.size);
    sha256(me.geometry.text, me.geometry.size, me.digest);
    reading = columns.text;
    me.end = (End){.side = me.side, .mine = &me.side->ranks[0]};
    me.end.columns = taken_list(L_Columns, json_here(), &me.end.column_count);
    say("\"geometry\": \"");
    Text hex = {0};
    form_hex(&hex, me.geometry.text, me.geometry.size);
    say(hex.text);
    say("\"");
    free(hex.text);
    free(json.text);
    free(columns.text);
    keep(&me.memory);
}
static void begin_fetch(const Json *question) {
    Source *source = source_named(member(question, "engine")->text);
    if (!source) deny("UNKNOWN_TICKET", "engine", "a source that was named by connect", "another");
    Fetch *fetch = calloc(1, sizeof *fetch);
    if (!fetch) abort();
    const Json *id = member(question, "id"), *key = member(question, "key"), *first = member(question, "first"), *tokens = member(question, "tokens");
    *fetch = (Fetch){.next = fetches, .id = copy_of(id->text, id->size), .source = source, .count = tokens->count, .first = first ? integer(first, NULL) : 0};
    memcpy(fetch->key, key->text, 32);
    fetch->tokens = calloc(fetch->count + 1, sizeof(uint64_t));
    uint64_t n = 0;
    for (const Json *each = tokens->items; each; each = each->next) fetch->tokens[n++] = integer(each, NULL);
    fetch->over = now() + (double)integer(member(question, "deadline"), NULL) / 1000 + TICKET_WAIT + PATIENCE;
    for (int g = 0; g < pool.count; g++) {
        const Cache *cache = &pool.caches[g];
        int need = !has_memory(cache) ? 0 : strcmp(cache->kind, "PAGE") ? 1 : (int)((fetch->count + (uint64_t)cache->rows - 1) / (uint64_t)cache->rows);
        for (unsigned item = 0; item < ITEMS && fetch->held[g] < need; item++)
            if (!pool.used[g][item]) {
                pool.used[g][item] = true;
                fetch->items[g][fetch->held[g]++] = item;
            }
    }
    fetches = fetch;
    greet_source(source);
    if (source->failed) give_up(fetch, source->failed, "no session");
    start(fetch);
}
static void wait_for(const Json *question) {
    Fetch *fetch = fetch_named(member(question, "id"));
    double until = now() + strtod(member(question, "seconds")->text, NULL);
    if (!fetch) deny("UNKNOWN_TICKET", "id", "a fetch", "none");
    while (now() < until && !fetch->arrived && !(fetch->lost && is_settled(fetch))) turn_once(until - now(), false);
    if (fetch->arrived) {
        say("\"state\": \"arrived\", \"finished\": ");
        say(fetch->finished ? "true" : "false");
        say(", \"free\": true, \"handoff\": {");
        bool more = false;
        for (int g = 0; g < pool.count; g++) {
            const Cache *cache = &pool.caches[g];
            size_t from = 0;
            if (has_memory(cache)) continue;
            Text json = {0};
            form(&json, "%s\"%s\": {", more ? ", " : "", cache->name);
            for (int p = 0; p < parts_of(cache) && from < fetch->handoff[g].size; p++) {
                form(&json, "%s\"%s\": \"", p ? ", " : "", cache->parts[p].name);
                form_hex(&json, fetch->handoff[g].text + from, (size_t)cache->parts[p].bytes);
                form(&json, "\"");
                from += (size_t)cache->parts[p].bytes;
            }
            form(&json, "}");
            say(json.text);
            free(json.text);
            more = true;
        }
        say("}");
    } else if (fetch->lost) {
        say("\"state\": \"lost\", \"code\": \"");
        say(fetch->lost);
        say(is_free(fetch) ? "\", \"free\": true" : "\", \"free\": false");
    } else say("\"state\": \"waiting\"");
}
static void release(Fetch *fetch) { /* its items too, where nothing can be written into them any more */
    if (!fetch->arrived && !fetch->lost) give_up(fetch, "ABORTED", "released");
    for (int g = 0; g < pool.count && is_free(fetch); g++)
        for (int i = 0; i < fetch->held[g]; i++) pool.used[g][fetch->items[g][i]] = false;
    Fetch **each = &fetches;
    while (*each != fetch) each = &(*each)->next;
    *each = fetch->next;
    Block *outer = blocks;
    for (size_t i = 0; i < fetch->attempt_count; i++) {
        blocks = fetch->attempts[i].memory;
        give_back();
    }
    blocks = outer;
    for (int g = 0; g < GROUPS; g++) free(fetch->handoff[g].text);
    free(fetch->attempts);
    free(fetch->tokens);
    free(fetch->id);
    free(fetch);
}
static void disconnect(Source *source) {
    for (Session *each = source->sessions; each; each = each->next) end_session(each, "PEER_LOST", true);
    for (Fetch *fetch = fetches; fetch; fetch = fetch->next)
        for (size_t i = 0; fetch->source == source && i < fetch->attempt_count; i++) fetch->attempts[i].session = NULL;
    for (Session **list = &source->sessions; list; list = list == &source->sessions ? &gone : NULL)
        for (Session **each = list; *each;) {
            Session *session = *each;
            if (session->source != source) {
                each = &session->next;
                continue;
            }
            *each = session->next;
            close_session(session);
        }
    for (Fetch **each = &fetches; *each;) { /* its items stay as they are where nothing is proven */
        if ((*each)->source == source) release(*each);
        else each = &(*each)->next;
    }
    Source **each = &sources;
    while (*each != source) each = &(*each)->next;
    *each = source->next;
    for (size_t i = 0; i < source->endpoint_count; i++) free(source->endpoints[i].address);
    free(source->endpoints);
    free(source->name);
    free(source->address);
    free(source);
}
static void answer_live(const char *op, const Json *question) {
    const Json *engine = member(question, "engine");
    Fetch *fetch = fetch_named(member(question, "id"));
    if (!strcmp(op, "open")) open_engine(question);
    else if (!strcmp(op, "fetch")) begin_fetch(question);
    else if (!strcmp(op, "wait")) wait_for(question);
    else if (!strcmp(op, "connect")) {
        Source *source = calloc(1, sizeof *source);
        if (!source) abort();
        *source = (Source){.next = sources, .name = copy_of(engine->text, engine->size), .address = copy_of(member(question, "address")->text, member(question, "address")->size)};
        sources = source;
        greet_source(source);
    } else if (!strcmp(op, "disconnect")) {
        if (source_named(engine->text)) disconnect(source_named(engine->text));
    } else if (!fetch) deny("UNKNOWN_TICKET", "id", "a fetch", "none");
    else if (!strcmp(op, "abort")) give_up(fetch, "ABORTED", "the engine says so");
    else if (!strcmp(op, "release")) release(fetch);
    else if (!strcmp(op, "read")) {
        int group = 0;
        while (group < pool.count - 1 && strcmp(pool.caches[group].name, member(question, "group")->text)) group++;
        Text json = {0};
        uint64_t layer = integer(member(question, "layer"), NULL), first = integer(member(question, "first"), NULL), count = integer(member(question, "count"), NULL);
        form(&json, "\"data\": \"");
        if (!read_rows(&json, fetch->items[group], group, (int)layer, member(question, "part")->text, first, count)) deny("PART_MISSING", "part", "a part of the group", "another");
        form(&json, "\"");
        say(json.text);
        free(json.text);
    }
}
static bool is_live(const char *op) {
    static const char *const names[] = {"open", "connect", "disconnect", "fetch", "wait", "read", "abort", "release"};
    for (int n = 0; n < COUNT(names); n++)
        if (!strcmp(names[n], op)) return true;
    return false;
}
static bool answer_more(const char *op, const Json *question) {
    if (!is_live(op)) return answer_of_lower(op, question);
    const size_t begun = out.size;
    jmp_buf here, *outer = refused;
    refused = &here;
    say("\"ok\": {");
    if (setjmp(here)) {
        out.size = begun;
        Text json = {0};
        form(&json, "\"err\": {\"code\": \"%s\", \"path\": \"%s\", \"text\": \"%s, not %s\"}", code, where.text, mine_text, yours_text);
        say(json.text);
        free(json.text);
    } else {
        answer_live(op, question);
        say("}");
    }
    refused = outer;
    return true;
}

/* ---- the loop ---- */

static bool stopped;
static Text heard;
static void hear_commands(void) {
    char bytes[1 << 16];
    ssize_t size = read(0, bytes, sizeof bytes);
    if (size <= 0) stopped = true;
    else add(&heard, bytes, (size_t)size);
    for (char *line_end; !stopped && heard.size && (line_end = memchr(heard.text, '\n', heard.size));) {
        size_t length = (size_t)(line_end - heard.text) + 1;
        char *line = copy_of(heard.text, length);
        memmove(heard.text, heard.text + length, heard.size - length);
        heard.size -= length;
        stopped = !answer_line(line);
        give_back();
        free(line);
    }
}
static void turn_once(double seconds, bool commands) { /* whatever comes within so many seconds, at most a tenth of one */
    zmq_pollitem_t items[128] = {{.fd = 0, .events = commands ? ZMQ_POLLIN : 0}};
    Session *polled[128];
    int count = 1;
    for (Source *source = sources; source; source = source->next)
        for (Session *each = source->sessions; each && count < 128; each = each->next) {
            items[count] = (zmq_pollitem_t){.socket = each->socket, .events = ZMQ_POLLIN};
            polled[count++] = each;
        }
    for (Session *each = gone; each && count < 128; each = each->next) {
        items[count] = (zmq_pollitem_t){.socket = each->socket, .events = ZMQ_POLLIN};
        polled[count++] = each;
    }
    zmq_poll(items, count, seconds < 0.1 ? (long)(seconds * 1000) : 100);
    Block *outer = blocks;
    blocks = NULL;
    for (int i = 1; i < count; i++) {
        if (items[i].revents & ZMQ_POLLIN) receive(polled[i]);
        on_time(polled[i]);
    }
    for (Fetch *each = fetches; each; each = each->next) {
        if (now() > each->over) give_up(each, "DEADLINE", "its ticket is over"); /* KVP-TRN-ENDLESS */
        start(each);
    }
    give_back();
    blocks = outer;
    if (items[0].revents) hear_commands();
}
int main(void) {
    context = zmq_ctx_new();
    while (!stopped) turn_once(0.1, true);
    while (sources) disconnect(sources);
    zmq_ctx_term(context);
    Block *outer = blocks;
    blocks = me.memory;
    give_back();
    blocks = outer;
    free(me.name);
    free(me.geometry.text);
    for (Text *each[] = {&heard, &out, &where, &made, &moves, &maps}, **t = each; t < each + 6; t++) free((*t)->text);
    return 0;
}
