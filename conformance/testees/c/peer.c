/* What the two sides of a session have in common: who this engine is, frames out, requests that are sent again, the ids of a frame that cannot be read; from session.md, errors.md,
 * registration.md and transfers.md. Included by session.c and serve.c, which say what is left open here. */
#include "pool.c"
#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <zmq.h>

enum { IDLE, GREETED, OPEN, DESCRIBING, DESCRIBED, REGISTERING, READY, CLOSED };
static const double RESEND = 2, PATIENCE = 30, TICKET_WAIT = 10, SILENCE = 5; /* seconds */

typedef struct Session Session;
typedef struct Request { struct Request *next; uint64_t id, sequence; int kind; Text frame; double again, until; } Request;
struct Session { /* with one rank of the peer */
    Session *next;
    struct Source *source; /* of a sink's session */
    struct Sink *sink;     /* of a source's session */
    void *socket;
    int state;
    bool verify, known, writer_ended; /* known: the source's rank has said who it is */
    int writer; /* the process that writes into this sink's memory, as a descriptor; 0 where it is not watched */
    uint64_t rank, replica, id, version, sequence, next_request, max_body, max_transfers, total, counted; /* rank, replica: the peer's; version: of the peer's Description; total, counted: bytes of Data */
    Request *requests;
    Block *memory; /* of the Description and the plan */
    Side *side;
    const kvp_plan *plan;
    const kvp_box *box; /* the plan's */
    size_t boxes;
    char digest[32];
    double heard;
};
static void *context;
static struct { char *name; uint64_t incarnation; bool verify; Text geometry; char digest[32]; Side *side; End end; Block *memory; } me;
static const char *inside = ""; /* inside: of what an error's path begins */
static void send_frame(Session *session, const Text *frame);
static bool routed(const Session *session, size_t i); /* whether box i is of this rank pair */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
static char *copy_of(const char *text, size_t size) {
    char *copy = calloc(1, size + 1);
    if (!copy) abort();
    memcpy(copy, text, size);
    return copy;
}
static void keep(Block **memory) { /* what was made so far outlives this turn */
    Block **last = &blocks;
    while (*last) last = &(*last)->next;
    *last = *memory;
    *memory = blocks;
    blocks = NULL;
}
static bool may_connect(const char *address) { /* ipc in a directory that others cannot enter; this sink has no keys (KVP-NET-INSECURE) */
    struct stat about;
    char folder[108];
    if (strncmp(address, "ipc://", 6) || address[6] != '/' || strlen(address + 6) >= sizeof folder) return false;
    strcpy(folder, address + 6);
    *strrchr(folder, '/') = 0;
    return !stat(*folder ? folder : "/", &about) && S_ISDIR(about.st_mode) && !(about.st_mode & 077);
}

/* ---- this host and its processes ---- */

static void this_boot(uint8_t boot[16]) {
    char digits[64] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (!file || !fgets(digits, sizeof digits, file)) abort();
    fclose(file);
    int n = 0;
    for (const char *c = digits; *c && n < 32; c++)
        if (*c != '-' && *c != '\n') {
            boot[n / 2] = (uint8_t)((n % 2 ? boot[n / 2] : 0) | (*c <= '9' ? *c - '0' : *c - 'a' + 10) << (n % 2 ? 0 : 4));
            n++;
        }
}
static bool start_of(uint64_t pid, uint64_t *start) { /* field 22 of what /proc says of a process; false where it says nothing */
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    FILE *file = fopen(path, "r");
    const char *from = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    for (int n = 2; n < 22 && from; n++) from = strchr(from + 1, ' ');
    if (from) *start = strtoull(from, NULL, 10);
    if (file) fclose(file);
    return from;
}
static uint64_t pid_namespace(void) {
    struct stat about;
    return stat("/proc/self/ns/pid", &about) ? 0 : (uint64_t)about.st_ino;
}

/* ---- whose memory it is ---- */

static void put_number(Text *text, uint64_t number, int size) {
    while (size--) add(text, &(uint8_t){(uint8_t)(number >> 8 * size)}, 1);
}
static void put_uint(Text *text, uint64_t number) { /* of msgpack, in its shortest form */
    int log = number >> 32 ? 3 : number >> 16 ? 2 : number >> 8 ? 1 : 0;
    if (number >= 0x80) put_number(text, (uint64_t)(0xcc + log), 1);
    put_number(text, number, number < 0x80 ? 1 : 1 << log);
}
static Text attestation_of(uint64_t session, int access, const char *source, uint64_t source_replica, uint64_t source_rank, const char *sink, uint64_t sink_replica, uint64_t sink_rank) { /* 32 bytes */
    const char *engines[2] = {source, sink};
    uint64_t replicas[2] = {source_replica, sink_replica}, ranks[2] = {source_rank, sink_rank};
    char digest[32];
    Text found = {0}, made = {0};
    put_number(&made, 0x98, 1);
    put_uint(&made, session);
    put_uint(&made, (uint64_t)access);
    for (int i = 0; i < 2; i++) {
        size_t size = strlen(engines[i]);
        put_number(&made, size < 32 ? 0xa0 | size : 0xd900 | size, size < 32 ? 1 : 2);
        add(&made, engines[i], size);
        put_uint(&made, replicas[i]);
        put_uint(&made, ranks[i]);
    }
    sha256(made.text, made.size, digest);
    free(made.text);
    add(&found, digest, sizeof digest);
    return found;
}

/* ---- frames out ---- */

static Text frame_of(int layout, const char *fields) { /* a frame of fields in JSON form */
    Text frame = {0};
    kvp_message *message;
    root_of_json(layout, fields, &message);
    add_message(&frame, message, true);
    kvp_message_free(message);
    return frame;
}
static void notice(Session *session, int layout, const char *fields) { /* or a reply: sent once */
    Text frame = frame_of(layout, fields);
    send_frame(session, &frame);
    free(frame.text);
}
static void await_answer(Session *session, int layout, uint64_t id, uint64_t sequence, Text frame) { /* sent, and again until it is answered */
    Request *request = calloc(1, sizeof *request);
    if (!request) abort();
    *request = (Request){session->requests, id, sequence, layout, frame, now() + RESEND, now() + PATIENCE};
    session->requests = request;
    send_frame(session, &request->frame);
}
static uint64_t ask(Session *session, int layout, uint64_t sequence, const char *fields) { /* under a fresh id; the first field */
    Text json = {0};
    uint64_t id = session->next_request++;
    form(&json, "{");
    if (layout != KVP_HELLO) form(&json, "\"session\": \"%llu\", ", (unsigned long long)session->id);
    form(&json, "\"request\": \"%llu\"%s}", (unsigned long long)id, fields);
    await_answer(session, layout, id, sequence, frame_of(layout, json.text));
    free(json.text);
    return id;
}
static bool answered(Session *session, const kvp_value *request, int kind) { /* whether this answers a request that is out */
    for (Request **each = &session->requests; *each; each = &(*each)->next)
        if ((*each)->id == request->number && (*each)->kind == kind) {
            Request *found = *each;
            *each = found->next;
            free(found->frame.text);
            free(found);
            return true;
        }
    return false;
}
static void form_named(Text *json, const char *name, const char *text) {
    form(json, ", \"%s\": ", name);
    form_quoted(json, text);
}
static void form_refusal(Text *json) { /* what was refused last; fields that follow others */
    form(json, ", \"code\": \"%s\"", code);
    form_named(json, "path", where.text);
    form_named(json, "mine", mine_text);
    form_named(json, "yours", yours_text);
}
static void say_error(Session *session, const kvp_value *id, const kvp_value *request, unsigned about) { /* about: a type, or 0 for a frame of none */
    Text json = {0}, refusal = {0};
    form(&json, "{");
    if (about) form(&json, "\"about\": \"%u\", ", about);
    if (id->kind) form(&json, "\"session\": \"%llu\", ", (unsigned long long)id->number);
    if (request->kind) form(&json, "\"request\": \"%llu\", ", (unsigned long long)request->number);
    form_refusal(&refusal);
    form(&json, "%s}", refusal.text + 2); /* without the comma before it */
    free(refusal.text);
    notice(session, KVP_ERROR, json.text);
    free(json.text);
}
static void drop_requests(Session *session, int but) { /* all, or all but those of one kind */
    for (Request **each = &session->requests; *each;) {
        Request *found = *each;
        if (found->kind == but) {
            each = &found->next;
            continue;
        }
        *each = found->next;
        free(found->frame.text);
        free(found);
    }
}

/* ---- frames in ---- */

static const int REQUESTS[] = {KVP_HELLO, KVP_PING, KVP_DESCRIBE, KVP_REGISTER, KVP_UNREGISTER, KVP_TRANSFER, KVP_GRANT, KVP_DONE, KVP_FAILED, KVP_ABORT, KVP_OFFER, KVP_RENEW};
static bool is_request(int layout) {
    for (int i = 0; i < COUNT(REQUESTS); i++)
        if (REQUESTS[i] == layout) return true;
    return false;
}
static kvp_value request_of(const kvp_value *map) { /* the id of a request, of any message that has one */
    kvp_value second = *kvp_field(map, KVP_DONE_REQUEST);
    return second.kind == KVP_KIND_UINT ? second : (kvp_value){0};
}
static void begin_path(void) { /* KVP-DSC-PATH */
    Text path = {0};
    if (!*inside) return;
    form(&path, "%s%s%s", inside, where.size && *where.text != '[' ? "." : "", where.text);
    where.size = 0;
    add(&where, path.text, path.size);
    free(path.text);
}

/* ---- what both sides state ---- */

static void form_routes(Text *text, const Session *session) { /* and the plan's digest, as Register and Registered have them */
    size_t count;
    const kvp_route *routes = kvp_plan_routes(session->plan, &count);
    form(text, "\"routes\": [");
    bool more = false;
    for (size_t i = 0; i < count; i++) {
        if (!routed(session, (size_t)(routes[i].boxes - session->box))) continue;
        form(text, "%s{\"group\": \"%llu\", \"digest\": \"", more ? ", " : "", (unsigned long long)routes[i].group);
        form_hex(text, routes[i].digest, 32);
        form(text, "\"}");
        more = true;
    }
    form(text, "], \"plan\": \"");
    form_hex(text, kvp_plan_digest(session->plan), 32);
    form(text, "\"");
}
static void make_plan(Session *session, const Side *source, const Side *sink, uint64_t features) {
    kvp_plan *plan;
    check(kvp_plan_new(source->description, sink->description, features, &TURN, &plan, &refusal));
    session->plan = plan;
    session->box = kvp_plan_boxes(plan, &session->boxes);
}
static void content_digest(char digest[32], const uint64_t *tokens, uint64_t count) { /* of a text */
    Text bytes = {0};
    kvp_message *content = kvp_message_new(KVP_CONTENT, &TURN);
    kvp_value *root = kvp_fill(content);
    kvp_set_numbers(content, root, KVP_CONTENT_TOKENS, tokens, count);
    kvp_set_bytes(content, root, KVP_CONTENT_ADAPTER, "", 0);
    kvp_set_texts(content, root, KVP_CONTENT_SALTS, NULL, NULL, 0);
    add_message(&bytes, content, false);
    sha256(bytes.text, bytes.size, digest);
    free(bytes.text);
    kvp_message_free(content);
}
static void open_engine(Slice question) { /* what this engine is from now on */
    Slice verify = member(question, "verify");
    if (!open_pool(text_of(member(question, "world")), is(member(question, "transport"), "SHM"))) deny("NO_TRANSPORT", "world", "gqa, mla, hybrid, long", "another");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint32_t chance;
    random_bytes(&chance, sizeof chance);
    me.name = strdup(text_of(member(question, "name")));
    me.incarnation = ((uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000) << 20 | (chance & 0xfffff);
    me.verify = !verify.text || *verify.text == 't';
    Text json = {0}, columns = {0};
    kvp_message *geometry;
    form_geometry(&json);
    form_columns(&columns);
    root_of_json(KVP_GEOMETRY, json.text, &geometry);
    add_message(&me.geometry, geometry, false);
    me.side = side_of(me.geometry.text, me.geometry.size);
    sha256(me.geometry.text, me.geometry.size, me.digest);
    me.end = (End){.side = me.side, .mine = &me.side->ranks[0], .columns = list_of_json(KVP_COLUMNS, columns.text)};
    form(&out, "\"geometry\": \"");
    form_hex(&out, me.geometry.text, me.geometry.size);
    form(&out, "\"");
    free(json.text);
    free(columns.text);
    keep(&me.memory);
}

/* ---- what the suite asks of a live engine ---- */

static void answer_live(Slice op, Slice question);
static void answer_as_engine(Slice op, Slice question) {
    const size_t begun = out.size;
    jmp_buf here, *outer = refused;
    refused = &here;
    form(&out, "\"ok\": {");
    if (setjmp(here)) {
        out.size = begun;
        form(&out, "\"err\": {\"code\": \"%s\", \"path\": \"%s\", \"text\": \"%s, not %s\"}", code, where.text, mine_text, yours_text);
    } else {
        answer_live(op, question);
        form(&out, "}");
    }
    refused = outer;
}
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
static void free_engine(void) {
    Block *outer = blocks;
    blocks = me.memory;
    give_back();
    blocks = outer;
    free(me.name);
    free(me.geometry.text);
    for (Text *each[] = {&heard, &out, &where}, **t = each; t < each + 3; t++) free((*t)->text);
}
