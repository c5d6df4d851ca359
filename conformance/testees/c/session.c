/* Sessions of a sink, over ZeroMQ: Hello to Registered, and Goodbye; from session.md, negotiation.md and registration.md. Included by hear.c. */
#include "peer.c"

static const uint64_t WINDOW = 1 << 20; /* bytes of Data on their way */

typedef struct Source Source;
typedef struct { uint64_t rank; char *address; } Endpoint;
struct Source { /* an engine */
    Source *next;
    char *name, *address;
    const char *failed; /* why no session with it can be */
    Session *sessions;
    Endpoint *endpoints; /* of all ranks, as the last Welcome says */
    size_t endpoint_count;
};
static Source *sources;
static Session *gone; /* closed, but an Abort or Drained may still pass */
static void lost(Session *session, const char *why); /* in sink.c: what the session's transfers come to */
static void became_ready(Source *source);
static void grant_credit(Session *session);
static bool hear_transfer(Session *session, int kind, const kvp_value *map);
static void refused_transfer(Session *session, int layout, const kvp_value *map);
static void answered_by_error(Session *session, uint64_t request, const char *name);
static void attest(Session *session, bool holds);

/* ---- a session's life ---- */

static const char *code_named(const char *name) { /* the same text, for good */
    uint64_t value;
    return kvp_value_named(KVP_ENUM_ERROR_CODE, name, strlen(name), &value) ? kvp_code_name((int)value) : "INTERNAL";
}
static void send_frame(Session *session, const Text *frame) {
    if (session->socket && frame->size <= HEADER + session->max_body) zmq_send(session->socket, frame->text, frame->size, ZMQ_DONTWAIT);
}
static void end_session(Session *session, const char *why, bool say_goodbye) {
    if (session->state == CLOSED) return;
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"reason\": \"%s\"}", (unsigned long long)session->id, why);
    if (say_goodbye && session->id) notice(session, KVP_GOODBYE, json.text);
    free(json.text);
    if (pool.shared && session->state >= REGISTERING) attest(session, false);
    session->state = CLOSED;
    drop_requests(session, KVP_ABORT); /* what nothing is proven of is asked on (KVP-END-LATE) */
    lost(session, why);
}
static void close_session(Session *session) {
    if (session->socket) zmq_close(session->socket);
    if (session->writer) close(session->writer);
    drop_requests(session, -1);
    Block *outer = blocks;
    blocks = session->memory;
    give_back();
    blocks = outer;
    free(session);
}
static Session *dial(Source *source, const char *address, uint64_t rank) {
    if (!may_connect(address)) return NULL;
    Session *session = calloc(1, sizeof *session);
    if (!session) abort();
    *session = (Session){.next = source->sessions, .source = source, .socket = zmq_socket(context, ZMQ_DEALER), .state = GREETED, .rank = rank, .next_request = 1, .max_body = KVP_MAX_BODY, .heard = now()};
    zmq_setsockopt(session->socket, ZMQ_LINGER, &(int){500}, sizeof(int));
    zmq_setsockopt(session->socket, ZMQ_MAXMSGSIZE, &(int64_t){HEADER + KVP_MAX_BODY}, sizeof(int64_t));
    if (zmq_connect(session->socket, address)) {
        zmq_close(session->socket);
        free(session);
        return NULL;
    }
    source->sessions = session;
    Text json = {0};
    form(&json, ", \"versions\": [{\"major\": \"%d\", \"min_minor\": \"0\", \"max_minor\": \"%d\"}], \"engine\": \"%s\", \"incarnation\": \"%llu\", \"rank\": \"0\", \"replica\": \"0\", \"role\": \"SINK\", ",
        KVP_MAJOR, KVP_MINOR, me.name, (unsigned long long)me.incarnation);
    form(&json, "\"offered\": [%s%s%s], \"needed\": [%s], \"limits\": {\"max_body\": \"%d\", \"max_transfers\": \"64\"}",
        me.verify ? "\"VERIFY\"" : "", me.verify && !pool.shared ? ", " : "", pool.shared ? "" : "\"INLINE\"", pool.shared ? "" : "\"INLINE\"", KVP_MAX_BODY);
    ask(session, KVP_HELLO, 0, json.text);
    free(json.text);
    return session;
}
static void greet_routed(Session *session);
static void greet_source(Source *source) { /* the seed endpoint first; it tells of the others */
    for (Session *each = source->sessions; each; each = each->next)
        if (each->state >= DESCRIBED && each->state != CLOSED) {
            greet_routed(each); /* a rank that went away may be back */
            return;
        }
    for (Session *each = source->sessions; each; each = each->next)
        if (each->state != CLOSED) return;
    while (source->sessions) { /* closed ones may still hear what is proven */
        Session *session = source->sessions;
        source->sessions = session->next;
        session->next = gone;
        gone = session;
    }
    if (!source->failed && !dial(source, source->address, UINT64_MAX)) source->failed = "NO_TRANSPORT";
}
static bool is_text(const kvp_value *text, const char *word) { return text->count == strlen(word) && !memcmp(text->bytes, word, text->count); }
static void welcome(Session *session, const kvp_value *map) {
    kvp_value request = field(map, KVP_WELCOME_REQUEST), features = field(map, KVP_WELCOME_FEATURES), engine = field(map, KVP_WELCOME_ENGINE), endpoints = field(map, KVP_WELCOME_ENDPOINTS);
    if (!answered(session, &request, KVP_HELLO)) return;
    session->id = kvp_number(map, KVP_WELCOME_SESSION);
    session->known = true;
    const kvp_value *version = kvp_field(map, KVP_WELCOME_VERSION), *limits = kvp_field(map, KVP_WELCOME_LIMITS);
    if (kvp_number(version, KVP_VERSION_MAJOR) != KVP_MAJOR || kvp_number(version, KVP_VERSION_MINOR) > KVP_MINOR) deny("FEATURE_MISSING", "version", "1.0", "another");
    if (!is_text(&engine, session->source->name)) deny("WRONG_PEER", "engine", session->source->name, "another");
    uint64_t rank = kvp_number(map, KVP_WELCOME_RANK);
    if (session->rank != UINT64_MAX && session->rank != rank) deny("WRONG_PEER", "rank", "that of the endpoint", "another");
    bool inlined = false;
    for (size_t i = 0; i < features.count; i++) {
        const char *name = kvp_value_name(KVP_ENUM_FEATURE, features.items[i].number);
        bool verify = name && !strcmp(name, "VERIFY") && me.verify, mine = verify || (name && !strcmp(name, "INLINE") && !pool.shared);
        if (!mine) deny("FEATURE_MISSING", "features", "what Hello offered", "more");
        session->verify |= verify;
        inlined |= !verify;
    }
    if (!pool.shared && !inlined) deny("FEATURE_MISSING", "features", "INLINE", "what lacks it");
    session->rank = rank;
    session->replica = kvp_number(map, KVP_WELCOME_REPLICA);
    session->max_body = kvp_number(limits, KVP_LIMITS_MAX_BODY);
    session->max_transfers = kvp_number(limits, KVP_LIMITS_MAX_TRANSFERS);
    for (size_t i = 0; i < session->source->endpoint_count; i++) free(session->source->endpoints[i].address);
    session->source->endpoints = realloc(session->source->endpoints, endpoints.count * sizeof(Endpoint));
    if (!session->source->endpoints) abort();
    session->source->endpoint_count = endpoints.count;
    for (size_t i = 0; i < endpoints.count; i++) {
        kvp_value address = field(&endpoints.items[i], KVP_ENDPOINT_ADDRESS);
        session->source->endpoints[i] = (Endpoint){kvp_number(&endpoints.items[i], KVP_ENDPOINT_RANK), copy_of(address.bytes, address.count)};
    }
    session->state = DESCRIBING;
    Text json = {0};
    form(&json, ", \"version\": \"1\", \"geometry\": \"");
    form_hex(&json, me.geometry.text, me.geometry.size);
    form(&json, "\", \"digest\": \"");
    form_hex(&json, me.digest, 32);
    form(&json, "\"");
    ask(session, KVP_DESCRIBE, 0, json.text);
    free(json.text);
}
static bool routed(const Session *session, size_t i) { return session->box[i].source == session->rank && session->box[i].sink == 0; }
static Session *session_of(const Source *source, uint64_t rank) {
    Session *each = source->sessions;
    while (each && (each->state == CLOSED || each->rank != rank)) each = each->next;
    return each;
}
static int attestations = -1; /* a file of 32 bytes for each session, and zeros in places that are free */
static void attest(Session *session, bool holds) { /* that this process has memory registered in it, or no longer (KVP-REG-ATTEST) */
    static const char unused[32];
    char row[32];
    off_t place = 0;
    if (attestations < 0 && (attestations = memfd_create("kvproto-attestations", MFD_CLOEXEC)) < 0) abort();
    Text own = attestation_of(session->id, 1, session->source->name, session->replica, session->rank, me.name, 0, 0);
    while (pread(attestations, row, sizeof row, place) == sizeof row && memcmp(row, holds ? unused : own.text, sizeof row)) place += sizeof row;
    bool found = pread(attestations, row, sizeof row, place) == sizeof row;
    if ((holds || found) && pwrite(attestations, holds ? own.text : unused, sizeof row, place) != sizeof row) abort();
    free(own.text);
}
static void form_region(Text *text) {
    uint8_t boot[16];
    this_boot(boot);
    form(text, "[{\"id\": \"0\", \"base\": \"0\", \"length\": \"%zu\", \"kind\": \"HOST\", \"boot\": \"", pool.size);
    form_hex(text, boot, 16);
    form(text, "\", \"handles\": [{\"transport\": \"%s\", \"data\": \"", pool.shared ? "SHM" : "INLINE");
    if (pool.shared) { /* an array of PID, descriptor, nonce, and descriptor of attestations */
        Text made = {0};
        put_number(&made, 0x94, 1);
        put_uint(&made, (uint64_t)getpid());
        put_uint(&made, (uint64_t)pool.fd);
        put_number(&made, 0xd920, 2);
        add(&made, pool.nonce, 32);
        put_uint(&made, (uint64_t)attestations);
        form_hex(text, made.text, made.size);
        free(made.text);
    }
    form(text, "\"}]}]");
}
static void register_memory(Session *session) {
    Text json = {0};
    if (pool.shared) attest(session, true);
    form(&json, ", \"source\": \"");
    form_hex(&json, session->digest, 32);
    form(&json, "\", \"sink\": \"");
    form_hex(&json, me.digest, 32);
    form(&json, "\", \"epoch\": \"1\", \"access\": \"WRITE\", \"regions\": ");
    form_region(&json);
    form(&json, ", \"columns\": ");
    form_columns(&json);
    form(&json, ", ");
    form_routes(&json, session);
    session->state = REGISTERING;
    ask(session, KVP_REGISTER, 0, json.text);
    free(json.text);
}
static bool equal(const kvp_value *one, const kvp_value *other) { /* of one field each, whether they are encoded alike */
    if (one->kind != other->kind || one->number != other->number || one->count != other->count) return false;
    bool same_bytes = !one->bytes || !one->count || !memcmp(one->bytes, other->bytes, one->count), same_numbers = !one->numbers || !memcmp(one->numbers, other->numbers, one->count * sizeof(uint64_t));
    for (size_t i = 0; one->items && i < one->count; i++)
        if (!equal(&one->items[i], &other->items[i])) return false;
    return same_bytes && same_numbers;
}
static _Noreturn void deny_unlike(const kvp_value *known, const kvp_value *stated) { /* at the first group that differs, or else the first field */
    static const int fields[] = {KVP_GEOMETRY_REPLICA, KVP_GEOMETRY_FACTS, KVP_GEOMETRY_GROUPS, KVP_GEOMETRY_RANKS};
    static const char *const names[] = {"replica", "facts", "groups", "ranks", "without"};
    mine_text = "as another rank states it";
    yours_text = "otherwise";
    for (int n = 0; n < 2; n++) {
        kvp_value some = field(n ? stated : known, KVP_GEOMETRY_GROUPS), others = field(n ? known : stated, KVP_GEOMETRY_GROUPS);
        for (size_t i = 0, k; i < some.count; i++) {
            const kvp_value *name = kvp_field(&some.items[i], KVP_GROUP_NAME);
            for (k = 0; k < others.count && !same(kvp_field(&others.items[k], KVP_GROUP_NAME), name);) k++;
            if (k < others.count && equal(&some.items[i], &others.items[k])) continue;
            char *path = get(name->count + 16);
            snprintf(path, name->count + 16, "groups[%.*s]", (int)name->count, name->bytes);
            refuse("DESCRIPTION_MISMATCH", path);
        }
    }
    int i = 0;
    while (i < COUNT(fields) && equal(kvp_field(known, fields[i]), kvp_field(stated, fields[i]))) i++;
    refuse("DESCRIPTION_MISMATCH", names[i]);
}
static void greet_routed(Session *session) { /* the other ranks that this one is routed from */
    const Source *source = session->source;
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t rank = session->box[i].source;
        if (session->box[i].sink != 0 || session_of(source, rank)) continue;
        size_t e = 0;
        while (e < source->endpoint_count && source->endpoints[e].rank != rank) e++;
        if (e == source->endpoint_count || !dial(session->source, source->endpoints[e].address, rank)) deny("NO_TRANSPORT", "endpoints", "ipc in a directory of mode 0700", "none for a routed rank");
    }
}
static void description(Session *session, const kvp_value *map) {
    kvp_value request = field(map, KVP_DESCRIPTION_REQUEST), geometry = field(map, KVP_DESCRIPTION_GEOMETRY), digest = field(map, KVP_DESCRIPTION_DIGEST);
    char found[32];
    if (!answered(session, &request, KVP_DESCRIBE)) return;
    session->state = DESCRIBED;
    sha256(geometry.bytes, geometry.count, found);
    if (memcmp(found, digest.bytes, 32)) deny("BAD_DIGEST", "digest", "the digest of the geometry", "another");
    session->version = kvp_number(map, KVP_DESCRIPTION_VERSION);
    memcpy(session->digest, found, 32);
    inside = "geometry";
    session->side = side_of(geometry.bytes, geometry.count);
    inside = "";
    for (const Session *each = session->source->sessions; each; each = each->next) { /* KVP-DSC-RANKS */
        bool first = each != session && each->state != CLOSED && each->version == 1 && session->version == 1;
        if (first && memcmp(each->digest, found, 32)) deny_unlike(kvp_description_root(each->side->description), kvp_description_root(session->side->description));
    }
    make_plan(session, session->side, me.side, 0);
    keep(&session->memory);
    greet_routed(session);
    for (size_t i = 0; i < session->boxes; i++)
        if (routed(session, i)) {
            register_memory(session);
            return;
        }
    became_ready(session->source); /* a rank without a route takes part in nothing */
}
static void watch_writer(Session *session, const kvp_value *process) { /* whose end proves that it writes no more; not the end of one that cannot be seen from here (KVP-REG-DEATH) */
    uint8_t here[16];
    uint64_t pid = kvp_number(process, KVP_PROCESS_PID), start;
    this_boot(here);
    if (memcmp(field(process, KVP_PROCESS_BOOT).bytes, here, 16) || kvp_number(process, KVP_PROCESS_NAMESPACE) != pid_namespace() || pid > INT32_MAX) return;
    int writer = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    session->writer_ended = writer < 0 && errno == ESRCH;
    if (writer >= 0 && start_of(pid, &start) && start == kvp_number(process, KVP_PROCESS_START)) session->writer = writer; /* opened before it is compared: a PID is given again */
    else if (writer >= 0) close(writer);
}
static bool has_writer(Session *session) { /* false once no process is left that could write into shared memory */
    struct pollfd writer = {.fd = session->writer, .events = POLLIN};
    if (session->writer && poll(&writer, 1, 0) == 1) session->writer_ended = true;
    return !session->writer_ended;
}
static void registered_by(Session *session, const kvp_value *map) {
    kvp_value request = field(map, KVP_REGISTERED_REQUEST), routes = field(map, KVP_REGISTERED_ROUTES), digest = field(map, KVP_REGISTERED_PLAN);
    if (!answered(session, &request, KVP_REGISTER)) return;
    if (kvp_number(map, KVP_REGISTERED_EPOCH) != 1) deny("OUT_OF_RANGE", "epoch", "1", "another");
    const char *transport = kvp_value_name(KVP_ENUM_TRANSPORT, kvp_number(map, KVP_REGISTERED_TRANSPORT));
    if (!transport || strcmp(transport, pool.shared ? "SHM" : "INLINE")) deny("NO_TRANSPORT", "transport", pool.shared ? "SHM" : "INLINE", "another");
    Text stated = {0}, own = {0};
    form(&stated, "\"routes\": [");
    for (size_t i = 0; i < routes.count; i++) {
        kvp_value each = field(&routes.items[i], KVP_ROUTE_REF_DIGEST);
        form(&stated, "%s{\"group\": \"%llu\", \"digest\": \"", i ? ", " : "", (unsigned long long)kvp_number(&routes.items[i], KVP_ROUTE_REF_GROUP));
        form_hex(&stated, each.bytes, each.count);
        form(&stated, "\"}");
    }
    form(&stated, "], \"plan\": \"");
    form_hex(&stated, digest.bytes, digest.count);
    form(&stated, "\"");
    form_routes(&own, session);
    bool same_routes = !strcmp(stated.text, own.text);
    free(stated.text);
    free(own.text);
    if (!same_routes) deny("ROUTE_MISMATCH", "routes", "those of both Descriptions", "others");
    kvp_value process = field(map, KVP_REGISTERED_PROCESS);
    if (pool.shared && process.kind) watch_writer(session, &process);
    session->state = READY;
    if (!pool.shared) grant_credit(session);
    became_ready(session->source);
}
