/* A kvproto sink in C11: it fetches caches over shm and inline, as a decode engine does. libzmq is all that it needs; made from spec/v1 alone.
 *
 *     gcc -std=c11 -O2 -o sink sink.c -lzmq
 *     kvproto-conformance run --live-sink ./sink -- ./sink
 *
 * It answers the questions of a testee at L2 (lower.c), and is the adapter of a live engine (testee.md). One rank, one thread. What it leaves out: keys, epochs, pull, staging,
 * intent, and to go on with a session over another connection; it opens another. In order: what the suite asks, the loop. Before them pool.c, peer.c, session.c, hear.c and transfers.c. */
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
static Fetch *fetch_named(const Json *id) {
    Fetch *each = fetches;
    while (each && (!id || strcmp(each->id, id->text))) each = each->next;
    return each;
}
static void turn_once(double seconds, bool commands);
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
    fetch->deadline = now() + (double)integer(member(question, "deadline"), NULL) / 1000;
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
static bool answer_more(const char *op, const Json *question) { return is_live(op) ? answer_as_engine(op, question) : answer_of_lower(op, question); }

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
