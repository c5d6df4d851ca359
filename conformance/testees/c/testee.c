/* A testee of the conformance suite on libkvproto: role both, level L2, with checksums, packed streams, inline, byte streams and the JSON form (spec/v1/testee.md).
 *
 *     gcc -std=c11 -O2 -I libkvproto/include -o testee testee.c libkvproto/src/kvproto.c && kvproto-conformance run -- ./testee
 *
 * It reads a line, asks the library, and writes a line. source.c and sink.c include it, and answer what the suite asks of live engines too. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kvproto.h"

#ifndef CLAIM
#define CLAIM "\"name\": \"libkvproto\", \"version\": \"" KVP_LIBRARY_VERSION "\", \"language\": \"c\", \"role\": \"both\", \"level\": \"L2\", " \
    "\"extensions\": [\"json\", \"streams\", \"deals\", \"sections\", \"spread\", \"cold\", \"verify\", \"staged\", \"inline\", \"epochs\", \"intent\", \"pull\", \"catalogue\", \"storage\"]"
#endif

/* ---- text ---- */

typedef struct { char *text; size_t size, room; } Text;
static Text out;
static char *room_in(Text *text, size_t size) { /* behind what it holds, with one byte more for a NUL */
    if (text->size + size + 1 > text->room) {
        text->room = 2 * (text->size + size + 1);
        text->text = realloc(text->text, text->room);
        if (!text->text) abort();
    }
    text->text[text->size + size] = 0;
    return text->text + text->size;
}
static void add(Text *text, const void *bytes, size_t size) {
    char *to = room_in(text, size);
    if (size) memcpy(to, bytes, size);
    text->size += size;
}
static void form(Text *text, const char *format, ...) {
    va_list list, again;
    va_start(list, format);
    va_copy(again, list);
    int size = vsnprintf(NULL, 0, format, list);
    vsnprintf(room_in(text, (size_t)size), (size_t)size + 1, format, again);
    text->size += (size_t)size;
    va_end(list);
    va_end(again);
}
static void form_hex(Text *text, const void *bytes, size_t size) {
    char *to = room_in(text, 2 * size);
    for (size_t i = 0; i < size; i++) {
        to[2 * i] = "0123456789abcdef"[((const uint8_t *)bytes)[i] >> 4];
        to[2 * i + 1] = "0123456789abcdef"[((const uint8_t *)bytes)[i] & 15];
    }
    text->size += 2 * size;
}
static void form_value(Text *text, const kvp_value *value) { /* in its JSON form */
    size_t size;
    kvp_to_json(value, NULL, 0, &size);
    kvp_to_json(value, room_in(text, size), size, &size);
    text->size += size;
}
static void form_quoted(Text *text, const char *words) {
    form(text, "\"");
    for (const char *c = words; *c; c++) form(text, *c == '"' || *c == '\\' ? "\\%c" : (uint8_t)*c < 0x20 ? "\\u%04x" : "%c", (uint8_t)*c);
    form(text, "\"");
}

/* ---- questions: JSON that the suite sends, in slices of its line ---- */

typedef struct { const char *text; size_t size; } Slice; /* text NULL: there is none */
static const char *past_blank(const char *at) { return at + strspn(at, " \t\r\n:,"); }
static const char *past(const char *at) { /* a value */
    int depth = 0;
    do {
        if (*at == '"')
            for (at++; *at && *at != '"'; at++) at += *at == '\\' && at[1];
        else depth += (*at == '[' || *at == '{') - (*at == ']' || *at == '}');
        if (*at) at++;
    } while (*at && (depth || !strchr(",]} \t\r\n:", *at)));
    return at;
}
static Slice slice_at(const char *at) { return (Slice){at, (size_t)(past(at) - at)}; }
static Slice first_of(Slice list) { /* of its values, or keys */
    const char *at = list.text ? past_blank(list.text + 1) : "";
    return *at && *at != ']' && *at != '}' ? slice_at(at) : (Slice){0};
}
static Slice next_of(Slice one) {
    const char *at = past_blank(one.text + one.size);
    return *at && *at != ']' && *at != '}' ? slice_at(at) : (Slice){0};
}
static bool is(Slice text, const char *word) { return text.text && text.size == strlen(word) + 2 && !memcmp(text.text + 1, word, text.size - 2); } /* of a quoted one */
static Slice member(Slice object, const char *name) {
    for (Slice key = first_of(object); key.text;) {
        Slice value = next_of(key);
        if (is(key, name)) return value;
        key = next_of(value);
    }
    return (Slice){0};
}
static size_t count_of(Slice list) {
    size_t count = 0;
    for (Slice each = first_of(list); each.text; each = next_of(each)) count++;
    return count;
}
static uint64_t integer(Slice text) { return text.text ? strtoull(text.text + (*text.text == '"'), NULL, 10) : 0; }
static void *got(size_t count, size_t size) {
    void *found = calloc(count + 1, size);
    if (!found) abort();
    return found;
}
static uint64_t *integers(Slice list, size_t *count) {
    uint64_t *numbers = got(count_of(list), sizeof *numbers);
    *count = 0;
    for (Slice each = first_of(list); each.text; each = next_of(each)) numbers[(*count)++] = integer(each);
    return numbers;
}
static uint8_t *unhex(Slice text, size_t *size) {
    *size = text.text ? (text.size - 2) / 2 : 0;
    uint8_t *bytes = got(*size, 1);
    for (size_t i = 0; i < *size; i++) bytes[i] = (uint8_t)strtoul((char[3]){text.text[1 + 2 * i], text.text[2 + 2 * i], 0}, NULL, 16);
    return bytes;
}

/* ---- answers ---- */

static kvp_error refusal;
static bool say_refusal(int code) { /* whether there is one */
    if (!code) return false;
    form(&out, "\"error\": \"%s\", \"path\": ", kvp_code_name(code));
    form_quoted(&out, refusal.path);
    return true;
}
static void answer_frame(const void *frame, size_t size) {
    kvp_message *message;
    if (say_refusal(kvp_decode(frame, size, NULL, &message, &refusal))) return;
    form(&out, "\"message\": \"%s\", \"fields\": ", kvp_layout_name((int)kvp_root(message)->layout));
    form_value(&out, kvp_root(message));
    kvp_message_free(message);
}
static void answer_decode(Slice question) {
    size_t size;
    uint8_t *frame = unhex(member(question, "frame"), &size);
    answer_frame(frame, size);
    free(frame);
}
static void answer_struct(Slice question, int layout) {
    size_t size;
    kvp_message *message;
    uint8_t *bytes = unhex(member(question, "bytes"), &size);
    if (!say_refusal(kvp_decode_struct(layout, bytes, size, NULL, &message, &refusal))) {
        form(&out, "\"fields\": ");
        form_value(&out, kvp_root(message));
        kvp_message_free(message);
    }
    free(bytes);
}
static void answer_encode(Slice question, int layout, bool frame) {
    kvp_message *message;
    Slice fields = member(question, "fields");
    if (say_refusal(kvp_from_json(layout, fields.text, fields.size, NULL, &message, &refusal))) return;
    int (*encode)(const kvp_message *, void *, size_t, size_t *, kvp_error *) = frame ? kvp_encode : kvp_encode_struct;
    size_t size;
    encode(message, NULL, 0, &size, &refusal);
    uint8_t *bytes = got(size, 1);
    if (!say_refusal(encode(message, bytes, size, &size, &refusal))) {
        form(&out, frame ? "\"frame\": \"" : "\"bytes\": \"");
        form_hex(&out, bytes, size);
        form(&out, "\"");
    }
    free(bytes);
    kvp_message_free(message);
}
static void answer_stream(Slice chunks) {
    kvp_stream *stream = kvp_stream_new(NULL);
    bool more = false;
    form(&out, "\"frames\": [");
    for (Slice chunk = first_of(chunks); chunk.text; chunk = next_of(chunk)) {
        size_t size;
        const void *frame;
        uint8_t *bytes = unhex(chunk, &size);
        kvp_stream_feed(stream, bytes, size);
        free(bytes);
        for (; kvp_stream_next(stream, &frame, &size); more = true) {
            form(&out, more ? ", {" : "{");
            answer_frame(frame, size);
            form(&out, "}");
        }
    }
    form(&out, "]");
    kvp_stream_free(stream);
}
static void answer_negotiate(Slice question) {
    static const char *const sides[2] = {"sink", "source"};
    kvp_terms terms[2] = {{0}};
    kvp_versions versions[2][64];
    for (int i = 0; i < 2; i++) {
        Slice side = member(question, sides[i]);
        terms[i].versions = versions[i];
        terms[i].offered = integers(member(side, "offered"), &terms[i].offered_count);
        terms[i].needed = integers(member(side, "needed"), &terms[i].needed_count);
        for (Slice each = first_of(member(side, "versions")); each.text && terms[i].version_count < 64; each = next_of(each)) {
            kvp_versions *v = &versions[i][terms[i].version_count++];
            sscanf(each.text, "\"%" SCNu32 ".%" SCNu32 "-%" SCNu32, &v->major, &v->least, &v->most);
        }
    }
    uint32_t major, minor;
    uint64_t *features = got(terms[0].offered_count, sizeof *features);
    size_t count;
    if (!say_refusal(kvp_negotiate(&terms[0], &terms[1], &major, &minor, features, &count, &refusal))) {
        form(&out, "\"version\": \"%u.%u\", \"features\": [", major, minor);
        for (size_t i = 0; i < count; i++) form(&out, "%s\"%" PRIu64 "\"", i ? ", " : "", features[i]);
        form(&out, "]");
    }
    free(features);
    for (int i = 0; i < 2; i++) {
        free((void *)terms[i].offered);
        free((void *)terms[i].needed);
    }
}

/* ---- plans ---- */

static kvp_description *described(Slice json) { /* NULL where it is refused, which is said */
    kvp_message *geometry;
    kvp_description *found = NULL;
    if (say_refusal(kvp_from_json(KVP_GEOMETRY, json.text, json.size, NULL, &geometry, &refusal))) return NULL;
    say_refusal(kvp_describe_message(geometry, NULL, &found, &refusal));
    kvp_message_free(geometry);
    return found;
}
static void say_plan(const kvp_plan *plan, const kvp_description *sink) {
    size_t count;
    form(&out, "\"plan\": \"");
    form_hex(&out, kvp_plan_digest(plan), 32);
    form(&out, "\", \"routes\": [");
    const kvp_route *routes = kvp_plan_routes(plan, &count);
    for (size_t i = 0; i < count; i++) {
        form(&out, "%s{\"source\": \"%" PRIu64 "\", \"sink\": \"%" PRIu64 "\", \"group\": \"%" PRIu64 "\", \"digest\": \"", i ? ", " : "", routes[i].source, routes[i].sink, routes[i].group);
        form_hex(&out, routes[i].digest, 32);
        form(&out, "\"}");
    }
    form(&out, "], \"required\": {");
    const kvp_value *ranks = kvp_field(kvp_description_root(sink), KVP_GEOMETRY_RANKS);
    for (size_t i = 0; i < ranks->count; i++) {
        uint64_t rank = kvp_number(&ranks->items[i], KVP_RANK_RANK);
        const uint64_t *sources = kvp_plan_required(plan, rank, &count);
        form(&out, "%s\"%" PRIu64 "\": [", i ? ", " : "", rank);
        for (size_t n = 0; n < count; n++) form(&out, "%s\"%" PRIu64 "\"", n ? ", " : "", sources[n]);
        form(&out, "]");
    }
    form(&out, "}, \"cold\": [");
    const uint64_t *cold = kvp_plan_cold(plan, &count);
    for (size_t i = 0; i < count; i++) form(&out, "%s\"%" PRIu64 "\"", i ? ", " : "", cold[i]);
    form(&out, "]");
}
static void answer_plan(Slice question) {
    kvp_description *source = described(member(question, "source")), *sink = source ? described(member(question, "sink")) : NULL;
    kvp_plan *plan = NULL;
    uint64_t features = 0, value;
    for (Slice each = first_of(member(question, "features")); each.text; each = next_of(each))
        if (kvp_value_named(KVP_ENUM_FEATURE, each.text + 1, each.size - 2, &value)) features |= KVP_FEATURE_BIT(value);
    if (sink && !say_refusal(kvp_plan_new(source, sink, features, NULL, &plan, &refusal))) say_plan(plan, sink);
    kvp_plan_free(plan);
    kvp_description_free(source);
    kvp_description_free(sink);
}

/* ---- tokens over ranks ---- */

static kvp_deal *deal_of(Slice group, kvp_message **message) { /* NULL where it is refused, which is said */
    kvp_deal *deal = NULL;
    if (!say_refusal(kvp_from_json(KVP_GROUP, group.text, group.size, NULL, message, &refusal))) say_refusal(kvp_deal_new(kvp_root(*message), NULL, &deal, &refusal));
    return deal;
}
static void say_some(bool there, uint64_t number) {
    if (there) form(&out, "\"%" PRIu64 "\"", number);
    else form(&out, "null");
}
static void say_rows(const kvp_deal *deal, uint64_t cp_size, uint64_t rows, bool pages, uint64_t token) {
    uint64_t most = 0;
    if (!pages) form(&out, "[");
    for (uint64_t cp_rank = 0; cp_rank < cp_size; cp_rank++) {
        uint64_t below = kvp_deal_rows(deal, cp_rank, token);
        most = below > most ? below : most;
        if (!pages) form(&out, "%s\"%" PRIu64 "\"", cp_rank ? ", " : "", below);
    }
    if (pages) say_some(true, (most + rows - 1) / rows);
    else form(&out, "]");
}
static void answer_deal(char op, Slice question) {
    kvp_message *group = NULL;
    kvp_deal *deal = deal_of(member(question, "group"), &group);
    size_t token_count, item_count;
    uint64_t *tokens = integers(member(question, "tokens"), &token_count), *items = integers(member(question, "items"), &item_count), cp_rank, row;
    uint64_t rows = group ? kvp_number(kvp_root(group), KVP_GROUP_ROWS) : 1, cp_size = group ? kvp_number(kvp_root(group), KVP_GROUP_CP_SIZE) : 0;
    for (int list = 0; deal && list < (op == 'o' ? 2 : 1); list++) {
        form(&out, op == 'o' ? (list ? "], \"row\": [" : "\"cp_rank\": [") : op == 'l' ? "\"rows\": [" : op == 'p' ? "\"pages\": [" : "\"slots\": [");
        for (size_t i = 0; i < token_count; i++) {
            bool owned = kvp_deal_owner(deal, tokens[i], &cp_rank, &row), here = owned && cp_rank == integer(member(question, "cp_rank")) && row / rows < item_count;
            form(&out, i ? ", " : "");
            if (op == 'o') say_some(owned, list ? row : cp_rank);
            else if (op == 's') say_some(here, here ? items[row / rows] * rows + row % rows : 0);
            else say_rows(deal, cp_size, rows, op == 'p', tokens[i]);
        }
    }
    if (deal) form(&out, "]");
    free(tokens);
    free(items);
    kvp_deal_free(deal);
    kvp_message_free(group);
}
static kvp_value cut_grants(const kvp_value *grants, const kvp_window *window, kvp_value *fields) { /* as they are asked for, with a window that is served; fields: room for as many as they have */
    kvp_value served = *grants;
    memcpy(fields, grants->items, grants->count * sizeof *fields);
    served.items = fields;
    kvp_value *items = (kvp_value *)kvp_field(&served, KVP_GRANTS_ITEMS);
    *(kvp_value *)kvp_field(&served, KVP_GRANTS_FIRST) = (kvp_value){.kind = KVP_KIND_UINT, .number = window->first};
    *(kvp_value *)kvp_field(&served, KVP_GRANTS_COUNT) = (kvp_value){.kind = KVP_KIND_UINT, .number = window->count};
    if (!items->kind) return served;
    items->numbers = window->items;
    items->count = window->item_count;
    return served;
}
static void say_window(const kvp_value *grants, const kvp_window *window) {
    kvp_value fields[16], served = cut_grants(grants, window, fields);
    if (window->first != kvp_number(grants, KVP_GRANTS_FIRST)) form(&out, "\"begins\": \"%" PRIu64 "\", ", window->first);
    form(&out, "\"window\": ");
    form_value(&out, &served);
}
static void answer_late(Slice question) {
    kvp_message *group = NULL, *grant = NULL;
    kvp_window window;
    Slice asked = member(question, "grant");
    kvp_deal *deal = deal_of(member(question, "group"), &group);
    uint64_t since = 0;
    for (Slice each = first_of(member(question, "since")); each.text; each = next_of(each)) since = integer(each) > since ? integer(each) : since;
    if (deal && !say_refusal(kvp_from_json(KVP_GRANTS, asked.text, asked.size, NULL, &grant, &refusal))
        && !say_refusal(kvp_deal_late(deal, integer(member(question, "cp_rank")), since, kvp_root(grant), &window, &refusal)))
        say_window(kvp_root(grant), &window);
    kvp_deal_free(deal);
    kvp_message_free(group);
    kvp_message_free(grant);
}

/* ---- copy programs ---- */

typedef struct { kvp_description *description; kvp_message *columns, *windows; kvp_end end; } AskedEnd;
static bool end_of(Slice json, AskedEnd *side) {
    Slice columns = member(json, "columns"), windows = member(json, "windows");
    side->description = described(member(json, "geometry"));
    if (!side->description || say_refusal(kvp_list_from_json(KVP_COLUMNS, columns.text, columns.size, NULL, &side->columns, &refusal))) return false;
    if (say_refusal(kvp_list_from_json(KVP_GRANTS, windows.text, windows.size, NULL, &side->windows, &refusal))) return false;
    side->end = (kvp_end){.description = side->description, .rank = integer(member(json, "rank")), .columns = kvp_root(side->columns), .windows = kvp_root(side->windows)};
    return true;
}
static void free_side(AskedEnd *side) {
    kvp_message_free(side->columns);
    kvp_message_free(side->windows);
    kvp_description_free(side->description);
}
static void say_runs(const kvp_copy *copies, size_t count) {
    form(&out, "[");
    for (size_t i = 0; i < count; i++)
        form(&out, "%s[\"%" PRIu64 "\", \"%" PRIu64 "\", \"%" PRIu64 "\", \"%" PRIu64 "\", \"%" PRIu64 "\"]", i ? ", " : "", copies[i].source_region, copies[i].source_offset, copies[i].sink_region,
            copies[i].sink_offset, copies[i].bytes);
    form(&out, "]");
}
static void *made_up(void *state, uint64_t region, uint64_t offset, uint64_t size) { /* the bytes of testee.md */
    Text *text = state;
    text->size = 0;
    uint8_t *bytes = (uint8_t *)room_in(text, size);
    for (uint64_t n = 0; n < size; n++) bytes[n] = (uint8_t)(7 * (offset + n) + region);
    return bytes;
}
static void say_sums(const kvp_program *program) {
    kvp_sum sums[512];
    Text bytes = {0};
    size_t count;
    if (!say_refusal(kvp_program_sums(program, false, made_up, &bytes, sums, 512, &count, &refusal))) {
        form(&out, "\"checksums\": {");
        for (size_t i = 0; i < count; i++) form(&out, "%s\"%" PRIu64 "\": \"%" PRIu64 "\"", i ? ", " : "", sums[i].group, sums[i].value);
        form(&out, "}");
    }
    free(bytes.text);
}
static void answer_lower(char op, Slice question) {
    AskedEnd sides[2] = {{0}};
    kvp_plan *plan = NULL;
    kvp_program *program = NULL;
    size_t count;
    if (end_of(member(question, "source"), &sides[0]) && end_of(member(question, "sink"), &sides[1])
        && !say_refusal(kvp_plan_new(sides[0].description, sides[1].description, 0, NULL, &plan, &refusal))
        && !say_refusal(kvp_lower(plan, &sides[0].end, &sides[1].end, NULL, &program, &refusal))) {
        if (op == 'c') say_sums(program);
        else {
            const kvp_copy *copies = op == 'l' ? kvp_program_copies(program, &count) : kvp_program_stream(program, &count);
            form(&out, op == 'l' ? "\"copies\": " : "\"stream\": ");
            say_runs(copies, count);
        }
    }
    kvp_program_free(program);
    kvp_plan_free(plan);
    for (int i = 0; i < 2; i++) free_side(&sides[i]);
}
static void answer_inline(Slice question) { /* packed.md: what is unpacked of the Data of one transfer, and counted against its credit */
    const uint64_t length = integer(member(question, "length")), total = integer(member(question, "total"));
    uint64_t unpacked = 0, counted = 0, which = 0, n = 0;
    const char *wrong = NULL, *path = "";
    for (Slice each = first_of(member(question, "data")); each.text; each = next_of(each), n++) {
        Slice first = first_of(each), second = next_of(first);
        const uint64_t offset = integer(first), size = integer(second);
        const bool last = is(next_of(second), "true"), beyond = size > total - counted;
        counted += beyond ? 0 : size;
        if (wrong) continue; /* the transfer has ended */
        which = n;
        if (beyond) wrong = "CREDIT", path = "data";
        else if (offset != unpacked || size > length - unpacked) wrong = "OUT_OF_RANGE", path = "offset";
        else if (last != (offset + size == length)) wrong = "FIELD_CONFLICT", path = "last";
        else unpacked += size;
    }
    form(&out, "\"unpacked\": \"%" PRIu64 "\", \"counted\": \"%" PRIu64 "\"", unpacked, counted);
    if (wrong) form(&out, ", \"refused\": [\"%" PRIu64 "\", \"%s\", \"%s\"]", which, wrong, path);
}

/* ---- lines ---- */

static void answer(Slice question) {
    Slice op = member(question, "op"), name = member(question, "message");
    if (!name.text) name = member(question, "struct");
    int layout = name.text ? kvp_layout_named(name.text + 1, name.size - 2) : -1;
    static const char *const deals[] = {"owner", "length", "pages", "slots"}, *const lowered[] = {"lower", "stream", "checksums"};
    for (int i = 0; i < 4; i++)
        if (is(op, deals[i])) {
            answer_deal(*deals[i], question);
            return;
        }
    for (int i = 0; i < 3; i++)
        if (is(op, lowered[i])) {
            answer_lower(*lowered[i], question);
            return;
        }
    if (is(op, "hello")) form(&out, "\"driver\": 1, \"spec\": \"" KVP_SPEC "\", " CLAIM);
    else if (is(op, "decode")) answer_decode(question);
    else if (is(op, "decode_stream")) answer_stream(member(question, "chunks"));
    else if (is(op, "decode_struct") && layout >= 0) answer_struct(question, layout);
    else if ((is(op, "encode") || is(op, "encode_struct")) && layout >= 0) answer_encode(question, layout, is(op, "encode"));
    else if (is(op, "negotiate")) answer_negotiate(question);
    else if (is(op, "plan")) answer_plan(question);
    else if (is(op, "late")) answer_late(question);
    else if (is(op, "inline")) answer_inline(question);
    else form(&out, "\"unsupported\": true");
}
#ifdef LIVE
static bool answer_live_too(Slice question); /* false where it is no question to a live engine */
#else
#define answer_live_too(question) false
#endif
static bool answer_line(const char *line) { /* false where it says stop */
    Slice question = slice_at(past_blank(line)), seq = member(question, "seq");
    if (is(member(question, "op"), "stop")) return false;
    out.size = 0;
    form(&out, "{\"seq\": %.*s, ", (int)seq.size, seq.text);
    if (!answer_live_too(question)) answer(question);
    form(&out, "}\n");
    fwrite(out.text, 1, out.size, stdout);
    fflush(stdout);
    return true;
}
#ifndef LIVE
int main(void) {
    Text line = {0};
    bool more = true;
    for (int c; more && (c = getchar()) != EOF;) {
        add(&line, &(char){(char)c}, 1);
        if (c != '\n') continue;
        more = answer_line(line.text);
        line.size = 0;
    }
    free(line.text);
    free(out.text);
    return 0;
}
#endif
