/* A strict reader of the kvproto message Register in C11, without a library, made from spec/v1 alone (framing.md, messages.md, json.md).
 *
 *     gcc -std=c11 -O2 -Wall -Wextra -Wpedantic -o register register.c
 *
 * A testee of the conformance suite: one JSON object a line, {"op": "decode", "frame": "HEX"}, is answered by {"message": "Register",
 * "fields": {...}}, {"error": CODE, "path": PATH}, or {"unsupported": true} for another message whose envelope is good. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BODY = 16777216, MAX_DEPTH = 8, MAX_ARRAY = 4194304, MAX_LIST = 65536, MAX_VALUES = 16384, MAX_STRING = 4096, MAX_BYTES = 8388608 };

/* what is read, what is written, and the first thing that is wrong */
static const uint8_t *data;
static size_t at, end, values; /* values: entries and elements so far */
static char *out;
static size_t out_size, out_room;
static char path[512];
static const char *wrong;

static void put(const char *text, size_t size) {
    if (out_size + size + 1 > out_room) {
        out_room = (out_size + size + 1) * 2;
        out = realloc(out, out_room);
        if (!out) abort();
    }
    memcpy(out + out_size, text, size);
    out_size += size;
    out[out_size] = 0;
}
static void puts_(const char *text) { put(text, strlen(text)); }
static void put_number(uint64_t value) {
    char text[24];
    put(text, (size_t)snprintf(text, sizeof text, "\"%llu\"", (unsigned long long)value));
}

static bool refuse(const char *code) {
    if (!wrong) wrong = code;
    return false;
}
/* one step deeper; returns what to hand to leave() */
static size_t enter(const char *name) {
    size_t was = strlen(path);
    if (was + strlen(name) + 2 < sizeof path) {
        if (was && name[0] != '[') strcat(path, ".");
        strcat(path, name);
    }
    return was;
}
static size_t enter_index(uint64_t i) {
    char text[24];
    snprintf(text, sizeof text, "[%llu]", (unsigned long long)i);
    return enter(text);
}
static void leave(size_t was) {
    if (!wrong) path[was] = 0; /* the path of the first refusal stays */
}
static bool refuse_at(const char *code, const char *step) {
    if (!wrong) enter(step);
    return refuse(code);
}

/* bytes and numbers */
static bool take(uint64_t size, const uint8_t **from) {
    if (size > end - at) return refuse("TRUNCATED"); /* KVP-BODY-END */
    *from = data + at;
    at += size;
    return true;
}
static bool number(unsigned width, uint64_t *value) {
    const uint8_t *from;
    if (!take(width, &from)) return false;
    *value = 0;
    for (unsigned i = 0; i < width; i++) *value = *value << 8 | from[i];
    return true;
}
static bool head_byte(uint8_t *head) {
    const uint8_t *from;
    if (!take(1, &from)) return false;
    *head = *from;
    return true;
}
static bool is_integer(uint8_t head) { return head <= 0x7f || head >= 0xe0 || (head >= 0xcc && head <= 0xd3); }

/* an integer in its shortest form, its head taken; negative ones have no value here (KVP-BODY-FORM) */
static bool integer(uint8_t head, uint64_t *value, bool *negative) {
    static const uint64_t least[] = {0x80, 0x100, 0x10000, 0x100000000};
    *negative = head >= 0xe0;
    *value = head;
    if (head <= 0x7f || head >= 0xe0) return true;
    unsigned k = (head - 0xcc) & 3, width = 1u << k;
    if (!number(width, value)) return false;
    if (head <= 0xcf) return *value >= least[k] || refuse("NOT_CANONICAL");
    int64_t is = (int64_t)(*value << (64 - 8 * width)) >> (64 - 8 * width);
    static const int64_t above[] = {-0x20, -0x80, -0x8000, -0x80000000LL};
    *negative = true;
    return is < above[k] || refuse("NOT_CANONICAL");
}
static bool unsigned_(uint64_t *value) {
    uint8_t head;
    bool negative;
    if (!head_byte(&head)) return false;
    if (!is_integer(head)) return refuse("BAD_TYPE"); /* KVP-BODY-TYPE */
    if (!integer(head, value, &negative)) return false;
    return !negative || refuse("BAD_TYPE");
}
/* a length of `width` bytes that needs at least `least` */
static bool length(unsigned width, uint64_t least, uint64_t *size) {
    return number(width, size) && (*size >= least || refuse("NOT_CANONICAL"));
}
/* entries of a map or elements of a list: depth, kind, form, limit, room */
static bool count(bool map, int depth, uint64_t *n) {
    uint8_t head, fixed = map ? 0x80 : 0x90, wide = map ? 0xde : 0xdc;
    if (depth > MAX_DEPTH) return refuse("TOO_DEEP");
    if (!head_byte(&head)) return false;
    if (head >= fixed && head < fixed + 16)
        *n = head - fixed;
    else if (head == wide || head == wide + 1) {
        if (!length(head == wide ? 2 : 4, head == wide ? 16 : 65536, n)) return false;
    } else
        return refuse("BAD_TYPE");
    if (*n > MAX_LIST || (values += *n) > MAX_VALUES) return refuse("TOO_LARGE");
    return *n * (map ? 2 : 1) <= end - at || refuse("TRUNCATED");
}

static bool utf8(const uint8_t *s, uint64_t n) {
    for (uint64_t i = 0; i < n;) {
        uint8_t c = s[i++];
        if (c < 0x80) continue;
        int more = c >= 0xf0 && c <= 0xf4 ? 3 : c >= 0xe0 && c <= 0xef ? 2 : c >= 0xc2 && c <= 0xdf ? 1 : 0;
        if (!more || n - i < (uint64_t)more) return false;
        uint8_t d = s[i];
        if ((c == 0xe0 && d < 0xa0) || (c == 0xed && d > 0x9f) || (c == 0xf0 && d < 0x90) || (c == 0xf4 && d > 0x8f)) return false;
        while (more--)
            if ((s[i++] & 0xc0) != 0x80) return false;
    }
    return true;
}
static bool text(uint64_t low, uint64_t high, const uint8_t **from, uint64_t *size) {
    uint8_t head;
    static const uint64_t least[] = {32, 256, 65536};
    if (!head_byte(&head)) return false;
    if (head >= 0xa0 && head <= 0xbf)
        *size = head - 0xa0;
    else if (head >= 0xd9 && head <= 0xdb) {
        if (!length(1u << (head - 0xd9), least[head - 0xd9], size)) return false;
    } else
        return refuse("BAD_TYPE");
    if (*size > MAX_STRING) return refuse("TOO_LARGE");
    if (!take(*size, from)) return false;
    if (!utf8(*from, *size)) return refuse("BAD_TEXT");
    return (*size >= low && *size <= high) || refuse("OUT_OF_RANGE");
}
static bool bytes(uint64_t low, uint64_t high, const uint8_t **from, uint64_t *size) {
    uint8_t head;
    static const uint64_t least[] = {0, 256, 65536};
    if (!head_byte(&head)) return false;
    if (head < 0xc4 || head > 0xc6) return refuse("BAD_TYPE");
    if (!length(1u << (head - 0xc4), least[head - 0xc4], size)) return false;
    if (*size > MAX_BYTES) return refuse("TOO_LARGE");
    if (!take(*size, from)) return false;
    return (*size >= low && *size <= high) || refuse("OUT_OF_RANGE");
}
static uint64_t element(const uint8_t *from, unsigned width) { /* little-endian */
    uint64_t value = 0;
    for (unsigned i = width; i--;) value = value << 8 | from[i];
    return value;
}
/* a number array: kind, form, code and width, whole elements, limit, room, narrowest width, range */
static bool array(unsigned widest, bool any_sign, uint64_t low, const uint8_t **from, uint64_t *n, unsigned *width) {
    uint8_t head, code;
    uint64_t size;
    static const uint64_t least[] = {0, 256, 65536};
    if (!head_byte(&head)) return false;
    if (head >= 0xd4 && head <= 0xd8)
        size = 1u << (head - 0xd4);
    else if (head >= 0xc7 && head <= 0xc9) {
        if (!length(1u << (head - 0xc7), least[head - 0xc7], &size)) return false;
        if (size == 1 || size == 2 || size == 4 || size == 8 || size == 16) return refuse("NOT_CANONICAL");
    } else
        return refuse("BAD_TYPE");
    if (!head_byte(&code)) return false;
    bool is_signed = code >= 5 && code <= 8;
    if (code < 1 || code > 8 || (is_signed && !any_sign)) return refuse("BAD_TYPE"); /* KVP-BODY-ARRAY-KIND */
    *width = 1u << ((code - 1) & 3);
    if (*width > widest) return refuse("BAD_TYPE");
    if (size % *width) return refuse("BAD_LENGTH");
    *n = size / *width;
    if (*n > MAX_ARRAY) return refuse("TOO_LARGE");
    if (!take(size, from)) return false;
    bool needed = *width == 1; /* whether some element needs the width (KVP-BODY-ARRAY-WIDTH) */
    for (uint64_t i = 0; i < *n && !needed; i++) {
        uint64_t value = element(*from + i * *width, *width);
        unsigned half = 4 * *width, whole = 8 * *width;
        int64_t is = (int64_t)(value << (64 - whole)) >> (64 - whole);
        needed = is_signed ? is < -((int64_t)1 << (half - 1)) || is >= (int64_t)1 << (half - 1) : value >> half != 0;
    }
    if (!needed) return refuse("NOT_CANONICAL");
    return *n >= low || refuse("OUT_OF_RANGE");
}

/* a value that may be ignored, which is canonical all the same (KVP-BODY-IGNORE-RULES) */
static bool skip(int depth) {
    const uint8_t *from;
    uint64_t n, id, before = 0;
    unsigned width;
    bool negative;
    if (at >= end) return refuse("TRUNCATED");
    uint8_t head = data[at];
    if ((head >= 0x80 && head <= 0x8f) || head == 0xde || head == 0xdf) {
        if (!count(true, depth, &n)) return false;
        while (n--) {
            if (!unsigned_(&id)) return false;
            if (id <= before) return refuse("FIELD_ORDER");
            if (id > 0xffff) return refuse("OUT_OF_RANGE");
            before = id;
            if (!skip(depth + 1)) return false;
        }
        return true;
    }
    if ((head >= 0x90 && head <= 0x9f) || head == 0xdc || head == 0xdd) {
        if (!count(false, depth, &n)) return false;
        while (n--)
            if (!skip(depth + 1)) return false;
        return true;
    }
    if ((head >= 0xa0 && head <= 0xbf) || (head >= 0xd9 && head <= 0xdb)) return text(0, MAX_STRING, &from, &n);
    if (head >= 0xc4 && head <= 0xc6) return bytes(0, MAX_BYTES, &from, &n);
    if ((head >= 0xd4 && head <= 0xd8) || (head >= 0xc7 && head <= 0xc9)) return array(8, true, 0, &from, &n, &width);
    if (head == 0xc2 || head == 0xc3) return at++, true;
    if (is_integer(head)) return at++, integer(head, &n, &negative);
    return refuse("BAD_TYPE");
}

/* the tables of messages.md */
enum type { INT, ENUM_OPEN, ENUM_CLOSED, TEXT, BYTES, ARRAY, LIST };
struct shape;
struct field {
    unsigned id;
    const char *name;
    enum type type;
    bool required;
    uint64_t low, high; /* range: values, bytes, elements; of an array `high` is the widest element in bytes */
    const char *const *names; /* of an enum, from 1 on */
    const struct shape *inner;
};
enum { MOST_IDS = 16 };
/* what the rules at the end of a map need: numbers, elements of arrays, and where a list stops ascending (index, or 0) */
struct seen {
    bool has[MOST_IDS];
    uint64_t value[MOST_IDS];
};
struct shape {
    const char *name;
    const struct field *fields;
    unsigned number;
    bool (*rules)(const struct seen *);
};

static bool region_rules(const struct seen *s) {
    if (s->value[2] > UINT64_C(0x8000000000000000) || s->value[3] > UINT64_C(0x8000000000000000) - s->value[2])
        return refuse_at("OUT_OF_RANGE", "length"); /* sum_le(base, length, 2^63) */
    if (s->has[5] != (s->value[4] == 2)) return refuse_at("FIELD_CONFLICT", "device"); /* present_iff(device, kind, CUDA) */
    return true;
}
static bool columns_rules(const struct seen *s) {
    static const char *const names[] = {"offset", "item_stride", "row_stride", "lane_stride"};
    for (unsigned i = 0; i < 4; i++)
        if (s->value[4 + i] != s->value[3]) return refuse_at("BAD_COLUMNS", names[i]); /* same_length */
    return true;
}
static bool register_rules(const struct seen *s) {
    static const char *const lists[] = {"regions", "columns", "routes"}, *const keys[] = {"id", "group", "group"};
    for (unsigned i = 0; i < 3; i++)
        if (s->value[7 + i]) { /* ascend */
            enter(lists[i]);
            enter_index(s->value[7 + i]);
            return refuse_at("NOT_ASCENDING", keys[i]);
        }
    return true;
}
static bool no_rules(const struct seen *s) { return s != NULL; }

#define U32 UINT32_MAX
#define U64 UINT64_MAX
static const char *const ACCESS[] = {"WRITE", "READ", NULL}, *const KIND[] = {"HOST", "CUDA", NULL},
                         *const TRANSPORT[] = {"SHM", "INLINE", "CUDA", "NIXL", NULL};
static const struct field HANDLE_FIELDS[] = {
    {1, "transport", ENUM_OPEN, true, 0, 0, TRANSPORT, NULL},
    {2, "data", BYTES, true, 0, MAX_BYTES, NULL, NULL},
};
static const struct shape HANDLE = {"Handle", HANDLE_FIELDS, 2, no_rules};
static const struct field REGION_FIELDS[] = {
    {1, "id", INT, true, 0, U32, NULL, NULL},         {2, "base", INT, true, 0, U64, NULL, NULL},
    {3, "length", INT, true, 1, U64, NULL, NULL},     {4, "kind", ENUM_OPEN, true, 0, 0, KIND, NULL},
    {5, "device", TEXT, false, 1, 128, NULL, NULL},   {6, "boot", BYTES, true, 16, 16, NULL, NULL},
    {7, "handles", LIST, true, 1, MAX_LIST, NULL, &HANDLE}, {8, "namespace", INT, false, 0, U64, NULL, NULL},
};
static const struct shape REGION = {"Region", REGION_FIELDS, 8, region_rules};
static const struct field COLUMNS_FIELDS[] = {
    {1, "group", INT, true, 0, U32, NULL, NULL},       {2, "items", INT, true, 1, U32, NULL, NULL},
    {3, "region", ARRAY, true, 1, 4, NULL, NULL},      {4, "offset", ARRAY, true, 0, 8, NULL, NULL},
    {5, "item_stride", ARRAY, true, 0, 8, NULL, NULL}, {6, "row_stride", ARRAY, true, 0, 8, NULL, NULL},
    {7, "lane_stride", ARRAY, true, 0, 8, NULL, NULL},
};
static const struct shape COLUMNS = {"Columns", COLUMNS_FIELDS, 7, columns_rules};
static const struct field ROUTE_FIELDS[] = {
    {1, "group", INT, true, 0, U32, NULL, NULL},
    {2, "digest", BYTES, true, 32, 32, NULL, NULL},
};
static const struct shape ROUTE = {"RouteRef", ROUTE_FIELDS, 2, no_rules};
static const struct field REGISTER_FIELDS[] = {
    {1, "session", INT, true, 0, U64, NULL, NULL},  {2, "request", INT, true, 0, U64, NULL, NULL},
    {3, "source", BYTES, true, 32, 32, NULL, NULL}, {4, "sink", BYTES, true, 32, 32, NULL, NULL},
    {5, "epoch", INT, true, 1, U32, NULL, NULL},    {6, "access", ENUM_CLOSED, true, 0, 0, ACCESS, NULL},
    {7, "regions", LIST, true, 0, MAX_LIST, NULL, &REGION}, {8, "columns", LIST, true, 0, MAX_LIST, NULL, &COLUMNS},
    {9, "routes", LIST, true, 0, MAX_LIST, NULL, &ROUTE},   {10, "plan", BYTES, true, 32, 32, NULL, NULL},
};
static const struct shape REGISTER = {"Register", REGISTER_FIELDS, 10, register_rules};

static bool map(const struct shape *shape, int depth, struct seen *seen);

static bool value(const struct field *f, int depth, struct seen *seen) {
    const uint8_t *from;
    uint64_t n, known, before = 0;
    unsigned width;
    struct seen inner;
    switch (f->type) {
    case INT:
        if (!unsigned_(&n)) return false;
        if (n < f->low || n > f->high) return refuse("OUT_OF_RANGE");
        put_number(seen->value[f->id] = n);
        return true;
    case ENUM_OPEN:
    case ENUM_CLOSED:
        if (!unsigned_(&n)) return false;
        for (known = 0; f->names[known]; known++) {}
        seen->value[f->id] = n;
        if (n >= 1 && n <= known) return puts_("\""), puts_(f->names[n - 1]), puts_("\""), true;
        if (n > 0xffff) return refuse("OUT_OF_RANGE");
        if (f->type == ENUM_CLOSED) return refuse("UNKNOWN_ENUM_VALUE");
        return puts_("{\"unknown\": "), put_number(n), puts_("}"), true; /* KVP-BODY-OPEN */
    case TEXT:
        if (!text(f->low, f->high, &from, &n)) return false;
        puts_("\"");
        for (uint64_t i = 0; i < n; i++) {
            char escape[8];
            if (from[i] == '"' || from[i] == '\\')
                put(escape, (size_t)snprintf(escape, sizeof escape, "\\%c", from[i]));
            else if (from[i] < 0x20)
                put(escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", from[i]));
            else
                put((const char *)from + i, 1);
        }
        puts_("\"");
        return true;
    case BYTES:
        if (!bytes(f->low, f->high, &from, &n)) return false;
        puts_("\"");
        for (uint64_t i = 0; i < n; i++) {
            char hex[3];
            put(hex, (size_t)snprintf(hex, sizeof hex, "%02x", from[i]));
        }
        puts_("\"");
        return true;
    case ARRAY:
        if (!array((unsigned)f->high, false, f->low, &from, &n, &width)) return false;
        seen->value[f->id] = n;
        puts_("[");
        for (uint64_t i = 0; i < n; i++) {
            if (i) puts_(", ");
            put_number(element(from + i * width, width));
        }
        puts_("]");
        return true;
    case LIST:
        if (!count(false, depth + 1, &n)) return false;
        if (n < f->low || n > f->high) return refuse("OUT_OF_RANGE");
        seen->value[f->id] = 0;
        puts_("[");
        for (uint64_t i = 0; i < n; i++) {
            size_t was = enter_index(i);
            if (i) puts_(", ");
            if (!map(f->inner, depth + 2, &inner)) return false;
            leave(was);
            /* field 1 is what lists of these structs ascend by */
            if (i && inner.value[1] <= before && !seen->value[f->id]) seen->value[f->id] = i;
            before = inner.value[1];
        }
        puts_("]");
        return true;
    }
    return false;
}

static const struct field *find(const struct shape *shape, uint64_t id) {
    for (unsigned i = 0; i < shape->number; i++)
        if (shape->fields[i].id == id) return &shape->fields[i];
    return NULL;
}

/* entries in order, then what is missing, then the rules */
static bool map(const struct shape *shape, int depth, struct seen *seen) {
    uint64_t n, id, before = 0;
    bool first = true;
    memset(seen, 0, sizeof *seen);
    if (!count(true, depth, &n)) return false;
    puts_("{");
    while (n--) {
        if (!unsigned_(&id)) return false;
        const struct field *f = find(shape, id);
        char label[24];
        snprintf(label, sizeof label, "#%04llx", (unsigned long long)id);
        size_t was = enter(f ? f->name : label);
        if (id <= before) return refuse("FIELD_ORDER");
        if (id > 0xffff) return refuse("OUT_OF_RANGE");
        before = id;
        if (f) {
            if (!first) puts_(", ");
            first = false;
            puts_("\""), puts_(f->name), puts_("\": ");
            seen->has[id] = true;
            if (!value(f, depth, seen)) return false;
        } else if (id < 0x8000)
            return refuse("UNKNOWN_FIELD");
        else if (!skip(depth + 1))
            return false;
        leave(was);
    }
    for (unsigned i = 0; i < shape->number; i++)
        if (shape->fields[i].required && !seen->has[shape->fields[i].id]) return refuse_at("MISSING_FIELD", shape->fields[i].name);
    puts_("}");
    return shape->rules(seen);
}

/* every type of 1.0; those up to 5 travel as major 0 */
static const uint16_t TYPES[] = {0x0001, 0x0002, 0x0003, 0x0004, 0x0005, 0x0006, 0x0007, 0x0101, 0x0102, 0x0103,
                                 0x0104, 0x0105, 0x0106, 0x0201, 0x0202, 0x0203, 0x0204, 0x0205, 0x0206, 0x0207,
                                 0x0208, 0x0209, 0x0301, 0x0302, 0x0303, 0x0401, 0x0402, 0x0403, 0x0404, 0x0405};

static bool envelope(size_t size, uint16_t *type) {
    bool known = false;
    if (memcmp(data, "KVPW", size < 4 ? size : 4)) return refuse_at("BAD_MAGIC", "@magic");
    if (size < 16) return refuse_at("TRUNCATED", "@length");
    *type = (uint16_t)element(data + 6, 2);
    uint64_t body = element(data + 12, 4);
    if (data[4] > 1) return refuse_at("UNSUPPORTED_VERSION", "@major");
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++) known |= TYPES[i] == *type;
    if (!known) return refuse_at("UNKNOWN_MESSAGE", "@type");
    if (data[4] != (*type > 5)) return refuse_at("UNSUPPORTED_VERSION", "@major");
    if (data[8]) return refuse_at("UNKNOWN_FLAG", "@flags");
    if (body > MAX_BODY) return refuse_at("TOO_LARGE", "@length");
    if (body != size - 16) return refuse_at(body > size - 16 ? "TRUNCATED" : "TRAILING_BYTES", "@length");
    return true;
}

static void decode(size_t size) {
    uint16_t type = 0;
    struct seen seen;
    out_size = 0, wrong = NULL, path[0] = 0;
    puts_("{\"message\": \"Register\", \"fields\": ");
    if (envelope(size, &type)) {
        if (type != 0x0103) {
            printf("{\"unsupported\": true}\n");
            return;
        }
        at = 16, end = size, values = 0;
        if (map(&REGISTER, 1, &seen) && at != end) refuse("TRAILING_BYTES");
    }
    if (wrong)
        printf("{\"error\": \"%s\", \"path\": \"%s\"}\n", wrong, path);
    else
        printf("%s}\n", out);
}

static int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

int main(void) {
    size_t room = 1 << 16, used = 0;
    char *line = malloc(room);
    if (!line) return 1;
    for (int c; (c = getchar()) != EOF;) {
        if (used + 2 > room && !(line = realloc(line, room *= 2))) return 1;
        if (c != '\n') {
            line[used++] = (char)c;
            continue;
        }
        line[used] = 0, used = 0;
        const char *op = strstr(line, "\"decode\""), *hex = strstr(line, "\"frame\"");
        if (hex) hex = strchr(hex + 7, '"');
        if (!op || !hex) {
            printf("{\"unsupported\": true}\n");
        } else {
            /* the frame alone, in memory of its own size, so that a sanitizer sees a byte too far */
            size_t size = 0;
            while (digit(hex[1 + 2 * size]) >= 0 && digit(hex[2 + 2 * size]) >= 0) size++;
            uint8_t *frame = malloc(size ? size : 1);
            if (!frame) return 1;
            for (size_t i = 0; i < size; i++) frame[i] = (uint8_t)(digit(hex[1 + 2 * i]) << 4 | digit(hex[2 + 2 * i]));
            data = frame;
            decode(size);
            free(frame);
        }
        fflush(stdout);
    }
    free(line), free(out);
    return 0;
}
