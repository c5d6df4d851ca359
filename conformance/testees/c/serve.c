/* Sessions of a source, over ZeroMQ: Hello to Description, and Goodbye; from session.md, negotiation.md and zeromq.md. Included by mapping.c. */
#include "peer.c"

enum { MAX_TRANSFERS = 64, MAX_SESSIONS = 4096, MAX_ENGINE_SESSIONS = 1024, REMEMBERED = 8192 };
static const uint64_t MAX_CREDIT = 4194304, MAX_DATA = 262144;

typedef struct { uint64_t id, length; uint8_t *bytes; } Mapped; /* a region of the sink's memory */
typedef struct Transfer Transfer;
typedef struct Sink { /* one rank of an engine, and what it has been told */
    char route[256], *engine;
    size_t route_size;
    uint64_t replica, incarnation, hello, describe, registered, epoch, low, features; /* hello, describe, registered: ids of requests; low: the low-water mark; features: a bit each */
    End end;
    Mapped *regions;
    size_t region_count;
    Transfer *transfers;
} Sink;
static Session *sessions; /* the youngest first */
static struct { uint64_t id; bool superseded; } ended[REMEMBERED];
static size_t ended_count;
static void *door;
static char *listening;
static bool draining;
static const char *const FEATURES[] = {"VERIFY", "SPREAD_ONE", "COLD_DRAFT", "INLINE", "FEW_SOURCES"};

static void lost(Session *session); /* in push.c: what becomes of its transfers */
static void resumed(Session *session);

/* ---- frames out ---- */

static void send_frame(Session *session, const Text *frame) {
    if (frame->size > HEADER + session->max_body) return;
    if (zmq_send(door, session->sink->route, session->sink->route_size, ZMQ_DONTWAIT | ZMQ_SNDMORE) >= 0) zmq_send(door, frame->text, frame->size, ZMQ_DONTWAIT);
}
static bool routed(const Session *session, size_t i) { return session->box[i].source == 0 && session->box[i].sink == session->rank; }

/* ---- a session's life ---- */

static void end_session(Session *session, const char *why, bool superseded) { /* why: said to the sink, if at all */
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"reason\": \"%s\"}", (unsigned long long)session->id, why ? why : "");
    if (why) notice(session, KVP_GOODBYE, json.text);
    free(json.text);
    ended[ended_count % REMEMBERED].id = session->id;
    ended[ended_count++ % REMEMBERED].superseded = superseded;
    Session **each = &sessions;
    while (*each != session) each = &(*each)->next;
    *each = session->next;
    lost(session);
    drop_requests(session, -1);
    for (size_t i = 0; i < session->sink->region_count; i++) munmap(session->sink->regions[i].bytes, session->sink->regions[i].length);
    Block *outer = blocks;
    blocks = session->memory;
    give_back();
    blocks = outer;
    free(session->sink->regions);
    free(session->sink->engine);
    free(session->sink);
    free(session);
}
static bool has_ended(uint64_t id, bool *superseded) {
    for (size_t i = ended_count; i && i + REMEMBERED > ended_count; i--)
        if (ended[(i - 1) % REMEMBERED].id == id) {
            *superseded = ended[(i - 1) % REMEMBERED].superseded;
            return true;
        }
    return false;
}
static Session *session_with(uint64_t id) {
    Session *each = sessions;
    while (each && each->id != id) each = each->next;
    return each;
}
static bool same_route(const Session *session, const char *route, size_t size) { return session->sink->route_size == size && !memcmp(session->sink->route, route, size); }
static bool same_rank(const Session *session, const char *engine, uint64_t replica, uint64_t rank) {
    return session->sink->replica == replica && session->rank == rank && !strcmp(session->sink->engine, engine);
}
static uint64_t open_run(const char *engine, uint64_t replica, uint64_t rank) { /* the greatest incarnation of a rank that has a session */
    uint64_t greatest = 0;
    for (Session *each = sessions; each; each = each->next)
        if (same_rank(each, engine, replica, rank) && each->sink->incarnation > greatest) greatest = each->sink->incarnation;
    return greatest;
}
static bool make_room(const char *engine) { /* by the end of the oldest session that has no Description, of this engine or of any; false where there is none */
    size_t count = 0;
    Session *oldest = NULL;
    for (Session *each = sessions; each; each = each->next) {
        if (engine && strcmp(each->sink->engine, engine)) continue;
        count++;
        if (each->state == OPEN) oldest = each;
    }
    if (count < (engine ? MAX_ENGINE_SESSIONS : MAX_SESSIONS)) return true;
    if (oldest) end_session(oldest, "others need the room", false);
    return oldest != NULL;
}

/* ---- Hello ---- */

static uint64_t features_of(const kvp_value *list) {
    uint64_t all = 0;
    for (size_t i = 0; i < list->count; i++) all |= list->items[i].number < 64 ? UINT64_C(1) << list->items[i].number : 0;
    return all;
}
static uint64_t feature(const char *name) {
    uint64_t value = 0;
    if (!kvp_value_named(KVP_ENUM_FEATURE, name, strlen(name), &value)) abort();
    return KVP_FEATURE_BIT(value);
}
static uint64_t offered(void) {
    uint64_t all = 0;
    for (int i = 0; i < COUNT(FEATURES); i++)
        if ((me.verify || strcmp(FEATURES[i], "VERIFY")) && (!pool.shared || strcmp(FEATURES[i], "INLINE"))) all |= feature(FEATURES[i]);
    return all;
}
static void send_welcome(Session *session) {
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"version\": {\"major\": \"%d\", \"minor\": \"%d\"}, \"engine\": \"%s\", \"incarnation\": \"%llu\", \"rank\": \"0\", \"replica\": \"0\", \"features\": [",
        (unsigned long long)session->id, (unsigned long long)session->sink->hello, KVP_MAJOR, KVP_MINOR, me.name, (unsigned long long)me.incarnation);
    bool more = false;
    for (int i = 0; i < COUNT(FEATURES); i++) {
        if (!(session->sink->features & feature(FEATURES[i]))) continue;
        form(&json, "%s\"%s\"", more ? ", " : "", FEATURES[i]);
        more = true;
    }
    form(&json, "], \"limits\": {\"max_body\": \"%d\", \"max_transfers\": \"%d\"}, \"endpoints\": [{\"rank\": \"0\", \"address\": \"%s\"}]}", KVP_MAX_BODY, MAX_TRANSFERS, listening);
    notice(session, KVP_WELCOME, json.text);
    free(json.text);
}
static void check_version(const kvp_value *map) {
    kvp_value versions = field(map, KVP_HELLO_VERSIONS);
    for (size_t i = 0; i < versions.count; i++) {
        const kvp_value *each = &versions.items[i];
        if (kvp_number(each, KVP_VERSION_RANGE_MAJOR) == KVP_MAJOR && kvp_number(each, KVP_VERSION_RANGE_MIN_MINOR) <= KVP_MINOR) return;
    }
    deny("NO_VERSION", "versions", "1.0", "others");
}
static void hello(const char *route, size_t size, const kvp_value *map) {
    kvp_value wanted = field(map, KVP_HELLO_OFFERED), needed = field(map, KVP_HELLO_NEEDED), name = field(map, KVP_HELLO_ENGINE), resume = field(map, KVP_HELLO_RESUME);
    uint64_t request = kvp_number(map, KVP_HELLO_REQUEST), replica = kvp_number(map, KVP_HELLO_REPLICA), rank = kvp_number(map, KVP_HELLO_RANK), incarnation = kvp_number(map, KVP_HELLO_INCARNATION);
    static char engine[160];
    memcpy(engine, name.bytes, name.count);
    engine[name.count] = 0;
    check_version(map);
    for (size_t i = 0; i < needed.count; i++)
        if (needed.items[i].number > 63 || !(offered() & UINT64_C(1) << needed.items[i].number)) deny("FEATURE_MISSING", "needed", "what this source offers", "more");
    if (!pool.shared && !(features_of(&wanted) & feature("INLINE"))) deny("FEATURE_MISSING", "offered", "INLINE", "not offered");
    if (kvp_number(map, KVP_HELLO_ROLE) != 2) deny("WRONG_PEER", "role", "SINK", "another");
    uint64_t features = features_of(&wanted) & offered();
    Session *held = resume.kind ? session_with(resume.number) : NULL;
    for (Session *each = sessions; !held && each; each = each->next)
        if (!resume.kind && same_route(each, route, size) && each->sink->hello == request) held = each; /* the same Hello again */
    if (held && (!same_rank(held, engine, replica, rank) || held->sink->incarnation != incarnation || held->sink->features != features)) held = NULL;
    if (held && request < held->sink->hello) return; /* KVP-SES-LATE */
    if (draining && !held) deny("DRAINING", "", "going away", "a new session");
    uint64_t run = open_run(engine, replica, rank);
    static char mine[32], yours[32];
    snprintf(mine, sizeof mine, "%llu", (unsigned long long)run);
    snprintf(yours, sizeof yours, "%llu", (unsigned long long)incarnation);
    if (incarnation < run) deny("SUPERSEDED", "incarnation", mine, yours);
    if (held) {
        bool again = request == held->sink->hello && same_route(held, route, size);
        memcpy(held->sink->route, route, size);
        held->sink->route_size = size;
        held->sink->hello = request;
        held->heard = now();
        send_welcome(held);
        if (!again) resumed(held);
        return;
    }
    if (!make_room(engine) || !make_room(NULL)) deny("BUSY", "", "as many sessions as there may be", "one more");
    if (incarnation > run)
        for (Session *each = sessions, *next; each; each = next) {
            next = each->next;
            if (same_rank(each, engine, replica, rank)) end_session(each, NULL, true);
        }
    Session *session = calloc(1, sizeof *session);
    Sink *sink = calloc(1, sizeof *sink);
    if (!session || !sink) abort();
    const kvp_value *limits = kvp_field(map, KVP_HELLO_LIMITS);
    *sink = (Sink){.engine = copy_of(engine, strlen(engine)), .route_size = size, .replica = replica, .incarnation = incarnation, .hello = request, .features = features};
    memcpy(sink->route, route, size);
    *session = (Session){.next = sessions, .sink = sink, .state = OPEN, .verify = features & feature("VERIFY"), .rank = rank, .next_request = 1, .max_body = kvp_number(limits, KVP_LIMITS_MAX_BODY), .heard = now()};
    while (!session->id || session_with(session->id)) random_bytes(&session->id, sizeof session->id);
    sessions = session;
    send_welcome(session);
}

/* ---- Describe ---- */

static void send_description(Session *session) {
    Text json = {0};
    form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"version\": \"1\", \"geometry\": \"", (unsigned long long)session->id, (unsigned long long)session->sink->describe);
    form_hex(&json, me.geometry.text, me.geometry.size);
    form(&json, "\", \"digest\": \"");
    form_hex(&json, me.digest, 32);
    form(&json, "\"}");
    notice(session, KVP_DESCRIPTION, json.text);
    free(json.text);
}
static void describe(Session *session, const kvp_value *map) {
    kvp_value geometry = field(map, KVP_DESCRIBE_GEOMETRY), digest = field(map, KVP_DESCRIBE_DIGEST);
    uint64_t request = kvp_number(map, KVP_DESCRIBE_REQUEST);
    Sink *sink = session->sink;
    if (session->state >= DESCRIBED && request == sink->describe) {
        send_description(session);
        return;
    }
    if (session->state != OPEN) deny("UNEXPECTED_MESSAGE", "", "a Description of this sink", "another Describe");
    char found[32];
    sha256(geometry.bytes, geometry.count, found);
    if (memcmp(found, digest.bytes, 32)) deny("BAD_DIGEST", "digest", "the digest of the geometry", "another");
    inside = "geometry";
    Side *side = side_of(geometry.bytes, geometry.count);
    inside = "";
    mine_text = "this source's Description";
    yours_text = "the sink's";
    make_plan(session, me.side, side, sink->features);
    session->side = side;
    session->version = kvp_number(map, KVP_DESCRIBE_VERSION);
    memcpy(session->digest, found, 32);
    sink->end = (End){.side = side, .rank = session->rank};
    for (size_t i = 0; i < side->rank_count; i++)
        if (side->ranks[i].rank == session->rank) sink->end.mine = &side->ranks[i];
    sink->describe = request;
    session->state = DESCRIBED;
    keep(&session->memory);
    send_description(session);
}
