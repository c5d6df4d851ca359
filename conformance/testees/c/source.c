/* A kvproto source in C11: it hands caches over by shm and inline, as a prefill engine does. an example on libkvproto, which needs libzmq besides.
 *
 *     gcc -std=c11 -O2 -I libkvproto/include -o source source.c libkvproto/src/kvproto.c -lzmq
 *     kvproto-conformance run --live-source ./source -- ./source
 *
 * It answers the questions of a testee at L2 (testee.c), and is the adapter of a live engine (testee.md). One rank, one thread. What it leaves out: keys, epochs, pull, staging,
 * intent, a catalogue. In order: frames in, prompts, what the suite asks, the loop. Before them engine.c, pool.c, peer.c, serve.c, mapping.c and push.c. */
#define CLAIM "\"name\": \"source.c\", \"version\": \"1\", \"language\": \"c\", \"role\": \"source\", \"level\": \"L4\", " \
    "\"extensions\": [\"json\", \"streams\", \"deals\", \"sections\", \"spread\", \"cold\", \"verify\", \"inline\", \"resume\"]"
#define POOL_ITEMS 256
#include "push.c"

/* ---- frames in ---- */

static void hear_error(const char *route, size_t size, const kvp_value *map) { /* never answered */
    kvp_value id = field(map, KVP_ERROR_SESSION), request = field(map, KVP_ERROR_REQUEST);
    const char *name = kvp_value_name(KVP_ENUM_ERROR_CODE, kvp_number(map, KVP_ERROR_CODE));
    Session *session = id.kind ? session_with(id.number) : NULL;
    if (!session || !same_route(session, route, size)) return;
    session->heard = now();
    if (name && (!strcmp(name, "UNKNOWN_SESSION") || !strcmp(name, "SUPERSEDED"))) end_session(session, NULL, false);
    else if (request.kind) refused_done(session, request.number);
}
static void act(Session *session, int layout, const kvp_value *map) {
    Text json = {0};
    kvp_value request = request_of(map);
    switch (layout) {
        case KVP_PING:
            form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)request.number);
            notice(session, KVP_PONG, json.text);
            free(json.text);
            break;
        case KVP_PONG: answered(session, &request, KVP_PING); break;
        case KVP_GOODBYE: end_session(session, NULL, false); break;
        case KVP_DESCRIBE: describe(session, map); break;
        case KVP_REGISTER: register_memory(session, map); break;
        case KVP_TRANSFER:
            hear_transfer(session, map);
            break;
        case KVP_DONE_ACK: done_ack(session, map); break;
        case KVP_ABORT: abort_transfer(session, map); break;
        case KVP_CREDIT: credit(session, map); break;
        default: deny("UNEXPECTED_MESSAGE", "", "a message with a row for this state", kvp_layout_name(layout));
    }
}
static void drained(const char *route, size_t size, const kvp_value *map) { /* of a session that has ended, with which all its writes have (KVP-END-AFTER) */
    Sink sink = {.route_size = size};
    Session past = {.sink = &sink, .id = kvp_number(map, KVP_ABORT_SESSION), .max_body = KVP_MAX_BODY};
    Text json = {0};
    memcpy(sink.route, route, size);
    form_ids(&json, &past, kvp_number(map, KVP_ABORT_REQUEST), kvp_number(map, KVP_ABORT_SEQUENCE));
    form(&json, ", \"proof\": \"PROVEN\"}");
    notice(&past, KVP_DRAINED, json.text);
    free(json.text);
}
static void answer_refused(const char *route, size_t size, int kind, const kvp_value *id, const kvp_value *request, const kvp_value *map) { /* by the message that carries the error */
    Sink sink = {.route_size = size};
    Session *session = id->kind ? session_with(id->number) : NULL, stranger = {.sink = &sink, .max_body = session ? session->max_body : KVP_MAX_BODY};
    bool by_refused = map && (kind == KVP_HELLO || kind == KVP_DESCRIBE || kind == KVP_REGISTER), by_failed = map && kind == KVP_TRANSFER;
    if (!strcmp(code, "UNKNOWN_SESSION") || (kind != KVP_HELLO && !strcmp(code, "SUPERSEDED"))) by_refused = by_failed = false;
    memcpy(sink.route, route, size);
    if (!by_refused && !by_failed) {
        say_error(&stranger, id, request, kind < 0 ? 0 : (unsigned)kind);
        return;
    }
    Text json = {0};
    form(&json, "{\"request\": \"%llu\"", (unsigned long long)request->number);
    if (id->kind && kind != KVP_HELLO) form(&json, ", \"session\": \"%llu\"", (unsigned long long)id->number);
    if (by_failed) form(&json, ", \"sequence\": \"%llu\"", (unsigned long long)kvp_number(map, KVP_TRANSFER_SEQUENCE));
    form_refusal(&json);
    form(&json, "}");
    notice(&stranger, by_failed ? KVP_FAILED : KVP_REFUSED, json.text);
    free(json.text);
}
static void hear_known(const char *route, size_t size, int kind, const kvp_value *map) {
    kvp_value id = *kvp_field(map, KVP_DONE_SESSION);
    bool superseded;
    if (kind == KVP_HELLO) hello(route, size, map);
    else if (kind == KVP_ERROR) hear_error(route, size, map);
    else {
        Session *session = id.kind ? session_with(id.number) : NULL;
        if (!session && id.kind && has_ended(id.number, &superseded)) {
            if (superseded) deny("SUPERSEDED", "session", "a later run of this rank", "an earlier one");
            if (kind == KVP_ABORT) {
                drained(route, size, map);
                return;
            }
        }
        if (!session || !same_route(session, route, size)) deny("UNKNOWN_SESSION", "session", "sessions of this connection", "another");
        session->heard = now();
        act(session, kind, map);
    }
}
static void hear(const char *route, size_t route_size, const uint8_t *frame, size_t size) {
    static const kvp_value *map; /* of a frame that could be read */
    Block *outer_blocks = blocks;
    jmp_buf here, *outer = refused;
    blocks = NULL;
    refused = &here;
    map = NULL;
    inside = "";
    mine_text = "what kvproto 1.0 says";
    yours_text = "what came";
    if (!setjmp(here)) {
        kvp_message *message;
        check(kvp_decode(frame, size, &TURN, &message, &refusal));
        map = kvp_root(message);
        hear_known(route, route_size, (int)map->layout, map);
    } else {
        refused = &here;
        kvp_value id, request;
        int kind = kvp_frame_ids(frame, size, &id, &request);
        begin_path();
        if (kind != KVP_ERROR && (map || kind < 0 || is_request(kind))) answer_refused(route, route_size, kind, &id, &request, map);
    }
    refused = outer;
    give_back();
    blocks = outer_blocks;
}
static void receive(void) { /* a bounded number of frames of all connections, which libzmq reads in turn (KVP-NET-TURN) */
    for (int n = 0; n < 256; n++) {
        zmq_msg_t part;
        char route[256];
        zmq_msg_init(&part);
        if (zmq_msg_recv(&part, door, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&part);
            return;
        }
        size_t size = zmq_msg_size(&part) < sizeof route ? zmq_msg_size(&part) : 0;
        memcpy(route, zmq_msg_data(&part), size);
        bool more = zmq_msg_more(&part);
        for (int frames = 0; more; frames++) {
            zmq_msg_recv(&part, door, ZMQ_DONTWAIT);
            more = zmq_msg_more(&part);
            if (!frames && !more) hear(route, size, zmq_msg_data(&part), zmq_msg_size(&part)); /* KVP-NET-ONE */
        }
        zmq_msg_close(&part);
    }
}
static void on_time(Session *session) {
    double time = now();
    bool pinged = false;
    for (Request *each = session->requests; each; each = each->next) {
        pinged |= each->kind == KVP_PING;
        if (time < each->again) continue;
        each->again = time + RESEND;
        if (time >= each->until) {
            end_session(session, "PEER_LOST", false);
            return;
        }
        send_frame(session, &each->frame);
    }
    for (Transfer *each = session->sink->transfers; each; each = each->next)
        if (each->state == WAITING && time >= each->until) {
            mine_text = "no prompt of it";
            yours_text = "a ticket";
            forget_use(session, each);
            fail(session, each, "UNKNOWN_TICKET", "ticket");
        }
    if (!pinged && time > session->heard + SILENCE) ask(session, KVP_PING, 0, "");
}

/* ---- prompts ---- */

static void for_each_transfer(const Prompt *prompt, void (*what)(Session *, Transfer *, Prompt *)) {
    for (Session *session = sessions; session; session = session->next)
        for (Transfer *each = session->sink->transfers; each; each = each->next)
            if (each->prompt == prompt || (!each->prompt && each->state == WAITING && !memcmp(each->key, prompt->key, 16))) what(session, each, (Prompt *)prompt);
}
static void on_come(Session *session, Transfer *transfer, Prompt *prompt) {
    if (transfer->state == WAITING) meet_prompt(session, transfer, prompt, 0);
}
static void on_progress(Session *session, Transfer *transfer, Prompt *prompt) {
    (void)prompt;
    go_on(session, transfer);
}
static void on_given_up(Session *session, Transfer *transfer, Prompt *prompt) {
    (void)prompt;
    if (transfer->state == RUNNING || transfer->state == STREAMING) fail(session, transfer, "ABORTED", "");
}
static void on_deadline(Session *session, Transfer *transfer, Prompt *prompt) {
    (void)prompt;
    if (transfer->state == RUNNING || transfer->state == STREAMING) fail(session, transfer, "DEADLINE", "");
}
static void no_room(Session *session, Transfer *transfer, Prompt *prompt) {
    (void)prompt;
    if (transfer->state == WAITING) fail(session, transfer, "PROMPT_TOO_LONG", "");
}
static void check_deadlines(void) {
    for (Prompt *each = prompts; each; each = each->next) {
        if (now() < each->deadline || each->state == EXPIRED) continue;
        Ticket *ticket = ticket_with(each->key);
        bool ended_before = ended_prompt(each);
        mine_text = "the ticket's deadline";
        yours_text = "passed";
        for_each_transfer(each, on_deadline);
        if (ticket) forget_ticket(ticket);
        if (ended_before) memset(each->key, 0, sizeof each->key); /* its ticket alone is forgotten */
        else each->state = EXPIRED;
        if (ended_before) each->deadline = 1e300;
        give_pages_back(each);
    }
}

/* ---- what the suite asks of a live engine ---- */

static void turn_once(double seconds, bool commands);
static const uint8_t *bytes_of(Slice hex, size_t *size) {
    uint8_t *made = unhex(hex, size), *bytes = get(*size + 1);
    memcpy(bytes, made, *size);
    free(made);
    return bytes;
}
static void open_source(Slice question) {
    char *address = strdup(text_of(member(question, "listen")));
    if (!may_connect(address)) {
        free(address);
        deny("NOT_ALLOWED", "listen", "ipc in a directory of mode 0700", "another address");
    }
    open_engine(question);
    door = zmq_socket(context, ZMQ_ROUTER);
    zmq_setsockopt(door, ZMQ_LINGER, &(int){500}, sizeof(int));
    zmq_setsockopt(door, ZMQ_MAXMSGSIZE, &(int64_t){HEADER + KVP_MAX_BODY}, sizeof(int64_t));
    zmq_setsockopt(door, ZMQ_RCVHWM, &(int){16}, sizeof(int));
    zmq_setsockopt(door, ZMQ_SNDHWM, &(int){2048}, sizeof(int));
    zmq_setsockopt(door, ZMQ_HANDSHAKE_IVL, &(int){5000}, sizeof(int));
    listening = address;
    if (zmq_bind(door, address)) deny("INTERNAL", "listen", "an address to listen at", "one that is taken");
}
static Prompt *prompt_named(Slice id) {
    Prompt *each = prompts;
    while (each && (!id.text || strcmp(each->id, text_of(id)))) each = each->next;
    return each;
}
static void take_request(Slice question) {
    size_t size;
    const uint8_t *key = bytes_of(member(question, "key"), &size);
    if (size != 16) deny("OUT_OF_RANGE", "key", "16 bytes", "another number");
    Prompt *prompt = calloc(1, sizeof *prompt);
    if (!prompt) abort();
    prompt->id = strdup(text_of(member(question, "id")));
    memcpy(prompt->key, key, 16);
    prompt->tokens = integers(member(question, "tokens"), &prompt->count);
    content_digest(prompt->content, prompt->tokens, prompt->count);
    prompt->deadline = now() + (double)integer(member(question, "deadline")) / 1000;
    bool room = true;
    for (int g = 0; g < pool.count; g++) {
        const Cache *cache = &pool.caches[g];
        int need = !has_memory(cache) ? 0 : strcmp(cache->kind, "PAGE") ? 1 : (int)((prompt->count + (uint64_t)cache->rows - 1) / (uint64_t)cache->rows);
        for (unsigned item = 0; item < ITEMS && prompt->held[g] < need; item++)
            if (!pool.used[g][item]) {
                pool.used[g][item] = true;
                prompt->items[g][prompt->held[g]++] = item;
            }
        room &= prompt->held[g] == need;
    }
    prompt->next = prompts;
    prompts = prompt;
    if (room) for_each_transfer(prompt, on_come);
    else {
        mine_text = "fewer pages";
        yours_text = "a longer prompt";
        for_each_transfer(prompt, no_room);
        prompt->state = UNDELIVERED;
        give_pages_back(prompt);
        deny("PROMPT_TOO_LONG", "tokens", "fewer pages", "a longer prompt");
    }
}
static void fill(Prompt *prompt, Slice question) {
    int group = 0;
    size_t size, row_size = 0, part = 0;
    const uint8_t *rows = bytes_of(member(question, "data"), &size);
    uint64_t layer = integer(member(question, "layer")), first = integer(member(question, "first"));
    while (group < pool.count - 1 && !is(member(question, "group"), pool.caches[group].name)) group++;
    const Cache *cache = &pool.caches[group];
    while ((int)part < parts_of(cache) - 1 && !is(member(question, "part"), cache->parts[part].name)) part++;
    row_size = (size_t)(cache->parts[part].lanes * cache->parts[part].bytes);
    for (uint64_t n = 0; n < size / row_size; n++)
        for (int head = 0; head < cache->parts[part].lanes; head++) {
            uint64_t row = first + n, page = strcmp(cache->kind, "PAGE") ? 0 : row / (uint64_t)cache->rows;
            if (page >= (uint64_t)prompt->held[group]) deny("OUT_OF_RANGE", "first", "a row of the request", "one beyond it");
            memcpy(head_row(group, (int)layer, (int)part, prompt->items[group][page], (int)(row % (uint64_t)cache->rows), head), rows + n * row_size + (size_t)(head * cache->parts[part].bytes), (size_t)cache->parts[part].bytes);
        }
}
static void finish(Prompt *prompt, Slice question) {
    Slice handoff = member(question, "handoff"), finished = member(question, "finished");
    for (int g = 0; g < pool.count; g++)
        for (int p = 0; !has_memory(&pool.caches[g]) && p < parts_of(&pool.caches[g]); p++) {
            Slice data_of = member(member(handoff, pool.caches[g].name), pool.caches[g].parts[p].name);
            size_t size;
            const uint8_t *bytes = bytes_of(data_of, &size);
            prompt->handoff[g][p].size = 0;
            add(&prompt->handoff[g][p], bytes, size);
        }
    prompt->ends = finished.text && *finished.text == 't';
    prompt->computed = prompt->count;
    prompt->finished = true;
    for_each_transfer(prompt, on_progress);
}
static void wait_for(const Prompt *prompt, Slice question) {
    static const char *const states[] = {"held", "freed", "undelivered", "expired"};
    double until = now() + strtod(member(question, "seconds").text, NULL);
    while (now() < until && !ended_prompt(prompt)) turn_once(until - now(), false);
    form(&out, "\"state\": \"%s\"", states[prompt->state]);
}
static void answer_live(Slice op, Slice question) {
    Prompt *prompt = prompt_named(member(question, "id"));
    if (is(op, "open")) open_source(question);
    else if (is(op, "request")) take_request(question);
    else if (is(op, "drain")) draining = true;
    else if (!prompt) deny("UNKNOWN_TICKET", "id", "a request", "none");
    else if (is(op, "wait")) wait_for(prompt, question);
    else if (ended_prompt(prompt)) return; /* whose prefill goes on for nobody */
    else if (is(op, "fill")) fill(prompt, question);
    else if (is(op, "finish")) finish(prompt, question);
    else if (is(op, "computed")) {
        prompt->computed = integer(member(question, "tokens"));
        for_each_transfer(prompt, on_progress);
    } else {
        prompt->given_up = true;
        mine_text = "given up";
        yours_text = "asked for";
        for_each_transfer(prompt, on_given_up);
        if (!ticket_with(prompt->key) && !ended_prompt(prompt)) {
            prompt->state = UNDELIVERED;
            give_pages_back(prompt);
        }
    }
}
static bool answer_live_too(Slice question) {
    static const char *const names[] = {"open", "request", "fill", "computed", "finish", "fail", "wait", "drain"};
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
    zmq_pollitem_t items[2] = {{.fd = 0, .events = commands ? ZMQ_POLLIN : 0}, {.socket = door, .events = ZMQ_POLLIN}};
    zmq_poll(items, door ? 2 : 1, seconds <= 0 ? 0 : seconds < 0.1 ? (long)(seconds * 1000) : 100);
    Block *outer = blocks;
    blocks = NULL;
    if (door) receive();
    for (Session *each = sessions, *next; each; each = next) {
        next = each->next;
        on_time(each);
    }
    check_deadlines();
    give_back();
    blocks = outer;
    if (items[0].revents) hear_commands();
}
static void free_all(void) {
    while (sessions) end_session(sessions, "it ends", false);
    while (tickets) forget_ticket(tickets);
    for (Prompt *each; (each = prompts);) {
        prompts = each->next;
        for (int g = 0; g < GROUPS; g++)
            for (int p = 0; p < 2; p++) free(each->handoff[g][p].text);
        free(each->tokens);
        free(each->id);
        free(each);
    }
    free(listening);
    free_engine();
}
int main(void) {
    context = zmq_ctx_new();
    while (!stopped) turn_once(0.1, true);
    while (sessions) end_session(sessions, "it ends", false);
    if (door) zmq_close(door);
    zmq_ctx_term(context);
    free_all();
    return 0;
}
