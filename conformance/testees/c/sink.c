/* A kvproto sink in C11: it fetches caches over shm and inline, as a decode engine does. an example on libkvproto, which needs libzmq besides.
 *
 *     gcc -std=c11 -O2 -I libkvproto/include -o sink sink.c libkvproto/src/kvproto.c -lzmq
 *     kvproto-conformance run --live-sink ./sink -- ./sink
 *
 * It answers the questions of a testee at L2 (testee.c), and is the adapter of a live engine (testee.md). One rank, one thread. What it leaves out: keys, epochs, pull, staging,
 * intent, and to go on with a session over another connection; it opens another. In order: what the suite asks, the loop. Before them engine.c, pool.c, peer.c, session.c, hear.c and transfers.c. */
#define CLAIM "\"name\": \"sink.c\", \"version\": \"1\", \"language\": \"c\", \"role\": \"sink\", \"level\": \"L4\", " \
    "\"extensions\": [\"json\", \"streams\", \"deals\", \"sections\", \"spread\", \"cold\", \"verify\", \"inline\"]"
#include "transfers.c"

/* ---- what the suite asks of a live engine ---- */

static bool read_rows(Text *text, const unsigned *items, int group, int layer, const char *name, uint64_t first, uint64_t count) { /* as hex, heads side by side */
    const Cache *cache = &pool.caches[group];
    int part = 0;
    while (part < parts_of(cache) && strcmp(cache->parts[part].name, name)) part++;
    if (part == parts_of(cache)) return false;
    bool pages = !strcmp(cache->kind, "PAGE");
    for (uint64_t row = first; row < first + count; row++)
        for (int head = 0; head < cache->parts[part].lanes; head++) {
            unsigned item = items[pages ? row / (uint64_t)cache->rows : 0];
            form_hex(text, head_row(group, layer, part, item, (int)(row % (uint64_t)cache->rows), head), (size_t)cache->parts[part].bytes);
        }
    return true;
}

static Source *source_named(const char *name) {
    Source *each = sources;
    while (each && strcmp(each->name, name)) each = each->next;
    return each;
}
static Fetch *fetch_named(Slice id) {
    Fetch *each = fetches;
    while (each && (!id.text || strcmp(each->id, text_of(id)))) each = each->next;
    return each;
}
static void turn_once(double seconds, bool commands);
static void begin_fetch(Slice question) {
    Source *source = source_named(text_of(member(question, "engine")));
    if (!source) deny("UNKNOWN_TICKET", "engine", "a source that was named by connect", "another");
    Fetch *fetch = calloc(1, sizeof *fetch);
    if (!fetch) abort();
    *fetch = (Fetch){.next = fetches, .id = strdup(text_of(member(question, "id"))), .source = source, .first = integer(member(question, "first"))};
    memcpy(fetch->key, text_of(member(question, "key")), 32);
    fetch->tokens = integers(member(question, "tokens"), &fetch->count);
    fetch->deadline = now() + (double)integer(member(question, "deadline")) / 1000;
    fetch->over = fetch->deadline + TICKET_WAIT + PATIENCE;
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
static void wait_for(Slice question) {
    Fetch *fetch = fetch_named(member(question, "id"));
    double until = now() + strtod(member(question, "seconds").text, NULL);
    if (!fetch) deny("UNKNOWN_TICKET", "id", "a fetch", "none");
    while (now() < until && !fetch->arrived && !(fetch->lost && is_settled(fetch))) turn_once(until - now(), false);
    if (fetch->arrived) {
        form(&out, "\"state\": \"arrived\", \"finished\": %s, \"free\": true, \"handoff\": {", fetch->finished ? "true" : "false");
        bool more = false;
        for (int g = 0; g < pool.count; g++) {
            const Cache *cache = &pool.caches[g];
            size_t from = 0;
            if (has_memory(cache)) continue;
            form(&out, "%s\"%s\": {", more ? ", " : "", cache->name);
            for (int p = 0; p < parts_of(cache) && from < fetch->handoff[g].size; p++) {
                form(&out, "%s\"%s\": \"", p ? ", " : "", cache->parts[p].name);
                form_hex(&out, fetch->handoff[g].text + from, (size_t)cache->parts[p].bytes);
                form(&out, "\"");
                from += (size_t)cache->parts[p].bytes;
            }
            form(&out, "}");
            more = true;
        }
        form(&out, "}");
    } else if (fetch->lost) form(&out, "\"state\": \"lost\", \"code\": \"%s\", \"free\": %s", fetch->lost, is_free(fetch) ? "true" : "false");
    else form(&out, "\"state\": \"waiting\"");
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
static void answer_live(Slice op, Slice question) {
    const char *engine = text_of(member(question, "engine"));
    Fetch *fetch = fetch_named(member(question, "id"));
    if (is(op, "open")) open_engine(question);
    else if (is(op, "fetch")) begin_fetch(question);
    else if (is(op, "wait")) wait_for(question);
    else if (is(op, "connect")) {
        Source *source = calloc(1, sizeof *source);
        if (!source) abort();
        *source = (Source){.next = sources, .name = strdup(engine), .address = strdup(text_of(member(question, "address")))};
        sources = source;
        greet_source(source);
    } else if (is(op, "disconnect")) {
        if (source_named(engine)) disconnect(source_named(engine));
    } else if (!fetch) deny("UNKNOWN_TICKET", "id", "a fetch", "none");
    else if (is(op, "abort")) give_up(fetch, "ABORTED", "the engine says so");
    else if (is(op, "release")) release(fetch);
    else if (is(op, "read")) {
        int group = 0;
        while (group < pool.count - 1 && !is(member(question, "group"), pool.caches[group].name)) group++;
        uint64_t layer = integer(member(question, "layer")), first = integer(member(question, "first")), count = integer(member(question, "count"));
        form(&out, "\"data\": \"");
        if (!read_rows(&out, fetch->items[group], group, (int)layer, text_of(member(question, "part")), first, count)) deny("PART_MISSING", "part", "a part of the group", "another");
        form(&out, "\"");
    }
}
static bool answer_live_too(Slice question) {
    static const char *const names[] = {"open", "connect", "disconnect", "fetch", "wait", "read", "abort", "release"};
    Slice op = member(question, "op");
    for (int n = 0; n < COUNT(names); n++)
        if (is(op, names[n])) {
            answer_as_engine(op, question);
            return true;
        }
    return false;
}

/* ---- the loop ---- */

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
    zmq_poll(items, count, seconds <= 0 ? 0 : seconds < 0.1 ? (long)(seconds * 1000) : 100); /* below 0 it would wait for ever */
    Block *outer = blocks;
    blocks = NULL;
    for (int i = 1; i < count; i++) {
        if (items[i].revents & ZMQ_POLLIN) receive(polled[i]);
        on_time(polled[i]);
    }
    for (Fetch *each = fetches; each; each = each->next) {
        if (now() > given_up_at(each)) give_up(each, "DEADLINE", "its ticket is over");
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
    free_engine();
    return 0;
}
