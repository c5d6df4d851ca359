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
static bool hear_transfer(Session *session, const Layout *layout, const Node *map);
static void refused_transfer(Session *session, int layout, const Node *map);
static void answered_by_error(Session *session, uint64_t request, const char *name);
static void attest(Session *session, bool holds);

/* ---- a session's life ---- */

static const char *code_named(const char *name) { /* the same text, for good */
    for (int i = 0; i < ENUMS[E_ErrorCode].count; i++)
        if (!strcmp(ENUMS[E_ErrorCode].values[i].name, name)) return ENUMS[E_ErrorCode].values[i].name;
    return "INTERNAL";
}
static void send_frame(Session *session, const Text *frame) {
    if (session->socket && frame->size <= HEADER + session->max_body) zmq_send(session->socket, frame->text, frame->size, ZMQ_DONTWAIT);
}
static void end_session(Session *session, const char *why, bool say_goodbye) {
    if (session->state == CLOSED) return;
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"reason\": \"%s\"}", (unsigned long long)session->id, why);
    if (say_goodbye && session->id) notice(session, L_Goodbye, json.text);
    free(json.text);
    if (pool.shared && session->state >= REGISTERING) attest(session, false);
    session->state = CLOSED;
    drop_requests(session, L_Abort); /* what nothing is proven of is asked on (KVP-END-LATE) */
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
    *session = (Session){.next = source->sessions, .source = source, .socket = zmq_socket(context, ZMQ_DEALER), .state = GREETED, .rank = rank, .next_request = 1, .max_body = MAX_BODY, .heard = now()};
    zmq_setsockopt(session->socket, ZMQ_LINGER, &(int){500}, sizeof(int));
    zmq_setsockopt(session->socket, ZMQ_MAXMSGSIZE, &(int64_t){HEADER + MAX_BODY}, sizeof(int64_t));
    if (zmq_connect(session->socket, address)) {
        zmq_close(session->socket);
        free(session);
        return NULL;
    }
    source->sessions = session;
    Text json = {0};
    form(&json, ", \"versions\": [{\"major\": \"%d\", \"min_minor\": \"0\", \"max_minor\": \"%d\"}], \"engine\": \"%s\", \"incarnation\": \"%llu\", \"rank\": \"0\", \"replica\": \"0\", \"role\": \"SINK\", ",
        MAJOR, MINOR, me.name, (unsigned long long)me.incarnation);
    form(&json, "\"offered\": [%s%s%s], \"needed\": [%s], \"limits\": {\"max_body\": \"%d\", \"max_transfers\": \"64\"}",
        me.verify ? "\"VERIFY\"" : "", me.verify && !pool.shared ? ", " : "", pool.shared ? "" : "\"INLINE\"", pool.shared ? "" : "\"INLINE\"", MAX_BODY);
    ask(session, L_Hello, 0, json.text);
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
static void welcome(Session *session, const Node *map) {
    Node request = field(L_Welcome, map, "request"), features = field(L_Welcome, map, "features"), engine = field(L_Welcome, map, "engine"), endpoints = field(L_Welcome, map, "endpoints");
    if (!answered(session, &request, L_Hello)) return;
    session->id = number(L_Welcome, map, "session");
    session->known = true;
    const Node *version = &map->items[field_index(&LAYOUTS[L_Welcome], "version")], *limits = &map->items[field_index(&LAYOUTS[L_Welcome], "limits")];
    if (number(L_Version, version, "major") != MAJOR || number(L_Version, version, "minor") > MINOR) deny("FEATURE_MISSING", "version", "1.0", "another");
    if (!is(&engine, session->source->name)) deny("WRONG_PEER", "engine", session->source->name, "another");
    uint64_t rank = number(L_Welcome, map, "rank");
    if (session->rank != UINT64_MAX && session->rank != rank) deny("WRONG_PEER", "rank", "that of the endpoint", "another");
    bool inlined = false;
    for (size_t i = 0; i < features.count; i++) {
        const char *name = name_of(&ENUMS[E_Feature], features.items[i].number);
        bool verify = name && !strcmp(name, "VERIFY") && me.verify, mine = verify || (name && !strcmp(name, "INLINE") && !pool.shared);
        if (!mine) deny("FEATURE_MISSING", "features", "what Hello offered", "more");
        session->verify |= verify;
        inlined |= !verify;
    }
    if (!pool.shared && !inlined) deny("FEATURE_MISSING", "features", "INLINE", "what lacks it");
    session->rank = rank;
    session->replica = number(L_Welcome, map, "replica");
    session->max_body = number(L_Limits, limits, "max_body");
    session->max_transfers = number(L_Limits, limits, "max_transfers");
    for (size_t i = 0; i < session->source->endpoint_count; i++) free(session->source->endpoints[i].address);
    session->source->endpoints = realloc(session->source->endpoints, endpoints.count * sizeof(Endpoint));
    if (!session->source->endpoints) abort();
    session->source->endpoint_count = endpoints.count;
    for (size_t i = 0; i < endpoints.count; i++) {
        Node address = field(L_Endpoint, &endpoints.items[i], "address");
        session->source->endpoints[i] = (Endpoint){number(L_Endpoint, &endpoints.items[i], "rank"), copy_of(address.bytes, address.count)};
    }
    session->state = DESCRIBING;
    Text json = {0};
    form(&json, ", \"version\": \"1\", \"geometry\": \"");
    form_hex(&json, me.geometry.text, me.geometry.size);
    form(&json, "\", \"digest\": \"");
    form_hex(&json, me.digest, 32);
    form(&json, "\"");
    ask(session, L_Describe, 0, json.text);
    free(json.text);
}
static bool routed(const Session *session, size_t i) { return session->box[i][0] == session->rank && session->box[i][1] == 0; }
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
        made.size = 0;
        put_number(0x94, 1);
        put_uint((uint64_t)getpid());
        put_uint((uint64_t)pool.fd);
        put_number(0xd9, 1);
        put_number(32, 1);
        add(&made, pool.nonce, 32);
        put_uint((uint64_t)attestations);
        form_hex(text, made.text, made.size);
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
    ask(session, L_Register, 0, json.text);
    free(json.text);
}
static bool same_encoding(const Type *type, const Node *one, const Node *other) {
    if (!one->kind || !other->kind) return one->kind == other->kind;
    made.size = 0;
    put(type, one);
    size_t size = made.size;
    put(type, other);
    return made.size == 2 * size && !memcmp(made.text, made.text + size, size);
}
static _Noreturn void deny_unlike(const Node *known, const Node *stated) { /* at the first group that differs, or else the first field */
    const Layout *geometry = &LAYOUTS[L_Geometry];
    const Field *list = &geometry->fields[field_index(geometry, "groups")];
    const int at_name = field_index(&LAYOUTS[L_Group], "name");
    mine_text = "as another rank states it";
    yours_text = "otherwise";
    for (int n = 0; n < 2; n++) {
        Node some = field(L_Geometry, n ? stated : known, "groups"), others = field(L_Geometry, n ? known : stated, "groups");
        for (size_t i = 0, k; i < some.count; i++) {
            Node name = some.items[i].items[at_name];
            for (k = 0; k < others.count && !same(&others.items[k].items[at_name], &name);) k++;
            if (k == others.count || !same_encoding(list->type.of, &some.items[i], &others.items[k])) unlike("DESCRIPTION_MISMATCH", &(Group){.name = name}, NULL, NULL);
        }
    }
    int i = 0;
    while (i < geometry->count - 1 && same_encoding(&geometry->fields[i].type, &known->items[i], &stated->items[i])) i++;
    refuse("DESCRIPTION_MISMATCH", &(Path){NULL, geometry->fields[i].name, 0});
}
static void greet_routed(Session *session) { /* the other ranks that this one is routed from */
    const Source *source = session->source;
    for (size_t i = 0; i < session->boxes; i++) {
        uint64_t rank = session->box[i][0];
        if (session->box[i][1] != 0 || session_of(source, rank)) continue;
        size_t e = 0;
        while (e < source->endpoint_count && source->endpoints[e].rank != rank) e++;
        if (e == source->endpoint_count || !dial(session->source, source->endpoints[e].address, rank)) deny("NO_TRANSPORT", "endpoints", "ipc in a directory of mode 0700", "none for a routed rank");
    }
}
static void description(Session *session, const Node *map) {
    Node request = field(L_Description, map, "request"), geometry = field(L_Description, map, "geometry"), digest = field(L_Description, map, "digest");
    char found[32];
    if (!answered(session, &request, L_Describe)) return;
    session->state = DESCRIBED;
    sha256(geometry.bytes, geometry.count, found);
    if (memcmp(found, digest.bytes, 32)) deny("BAD_DIGEST", "digest", "the digest of the geometry", "another");
    session->version = number(L_Description, map, "version");
    memcpy(session->digest, found, 32);
    uint8_t *bytes = get(geometry.count + 1);
    memcpy(bytes, geometry.bytes, geometry.count);
    Node *theirs = get(sizeof *theirs);
    inside = "geometry";
    *theirs = body(&LAYOUTS[L_Geometry], bytes, geometry.count);
    session->side = side_of_map(theirs);
    inside = "";
    session->stated = theirs;
    for (const Session *each = session->source->sessions; each; each = each->next) { /* KVP-DSC-RANKS */
        bool first = each != session && each->state != CLOSED && each->version == 1 && session->version == 1;
        if (first && memcmp(each->digest, found, 32)) deny_unlike(each->stated, theirs);
    }
    Plan plan = {.source = session->side, .sink = me.side};
    uint64_t(*row)[ROW] = plan_rows(&plan, &session->boxes);
    session->box = get((session->boxes + 1) * sizeof *row);
    memcpy(session->box, row, session->boxes * sizeof *row);
    keep(&session->memory);
    greet_routed(session);
    for (size_t i = 0; i < session->boxes; i++)
        if (routed(session, i)) {
            register_memory(session);
            return;
        }
    became_ready(session->source); /* a rank without a route takes part in nothing */
}
static void watch_writer(Session *session, const Node *process) { /* whose end proves that it writes no more; not the end of one that cannot be seen from here (KVP-REG-DEATH) */
    uint8_t here[16];
    uint64_t pid = number(L_Process, process, "pid"), start;
    this_boot(here);
    if (memcmp(field(L_Process, process, "boot").bytes, here, 16) || number(L_Process, process, "namespace") != pid_namespace() || pid > INT32_MAX) return;
    int writer = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    session->writer_ended = writer < 0 && errno == ESRCH;
    if (writer >= 0 && start_of(pid, &start) && start == number(L_Process, process, "start")) session->writer = writer; /* opened before it is compared: a PID is given again */
    else if (writer >= 0) close(writer);
}
static bool has_writer(Session *session) { /* false once no process is left that could write into shared memory */
    struct pollfd writer = {.fd = session->writer, .events = POLLIN};
    if (session->writer && poll(&writer, 1, 0) == 1) session->writer_ended = true;
    return !session->writer_ended;
}
static void registered_by(Session *session, const Node *map) {
    Node request = field(L_Registered, map, "request"), routes = field(L_Registered, map, "routes"), digest = field(L_Registered, map, "plan");
    if (!answered(session, &request, L_Register)) return;
    if (number(L_Registered, map, "epoch") != 1) deny("OUT_OF_RANGE", "epoch", "1", "another");
    const char *transport = name_of(&ENUMS[E_Transport], number(L_Registered, map, "transport"));
    if (!transport || strcmp(transport, pool.shared ? "SHM" : "INLINE")) deny("NO_TRANSPORT", "transport", pool.shared ? "SHM" : "INLINE", "another");
    Text stated = {0}, own = {0};
    form(&stated, "\"routes\": [");
    for (size_t i = 0; i < routes.count; i++) {
        Node each = field(L_RouteRef, &routes.items[i], "digest");
        form(&stated, "%s{\"group\": \"%llu\", \"digest\": \"", i ? ", " : "", (unsigned long long)number(L_RouteRef, &routes.items[i], "group"));
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
    Node process = field(L_Registered, map, "process");
    if (pool.shared && process.kind) watch_writer(session, &process);
    session->state = READY;
    if (!pool.shared) grant_credit(session);
    became_ready(session->source);
}
