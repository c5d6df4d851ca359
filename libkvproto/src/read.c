/* Reading: frames and structs to values, strictly (framing.md, messages.md). */

enum { HEADER = 16, MAY_IGNORE = 0x8000, LAST_ID = 0xffff };

static const Layout *layout_of(uint32_t number) {
    for (int i = 0; i < COUNT(LAYOUTS); i++)
        if (LAYOUTS[i].number == number) return &LAYOUTS[i];
    return NULL;
}
static const char *name_of(const Enum *type, uint64_t value) {
    for (int i = 0; i < type->count; i++)
        if (type->values[i].value == value) return type->values[i].name;
    return NULL;
}
static uint64_t limit_of(int kind) { return kind == TEXT ? KVP_MAX_STRING : kind == BYTES ? KVP_MAX_BYTES : kind == ARRAY ? KVP_MAX_ARRAY : KVP_MAX_LIST; }
static void within(Work *w, const Type *type, uint64_t number, const Path *path) {
    if (number < type->least || number > type->most) refuse(w, KVP_E_OUT_OF_RANGE, path);
}

/* ---- the forms of msgpack ---- */

static size_t left(const Work *w) { return w->end - w->at; }
static const uint8_t *take(Work *w, uint64_t size, const Path *path) {
    if (size > left(w)) refuse(w, KVP_E_TRUNCATED, path);
    w->at += (size_t)size;
    return w->data + w->at - size;
}
static int kind_here(Work *w, const Path *path) {
    if (!left(w)) refuse(w, KVP_E_TRUNCATED, path);
    uint8_t first = w->data[w->at];
    static const uint8_t longer[32] = {NONE, NONE, BOOL, BOOL, BYTES, BYTES, BYTES, ARRAY, ARRAY, ARRAY, NONE, NONE, UINT, UINT, UINT, UINT,
        SIGNED, SIGNED, SIGNED, SIGNED, ARRAY, ARRAY, ARRAY, ARRAY, ARRAY, TEXT, TEXT, TEXT, LIST, LIST, MAP, MAP};
    return first < 0x80 ? UINT : first < 0x90 ? MAP : first < 0xa0 ? LIST : first < 0xc0 ? TEXT : first < 0xe0 ? longer[first - 0xc0] : SIGNED;
}
static uint64_t number_of(const uint8_t *bytes, int size, bool little) {
    uint64_t number = 0;
    for (int i = 0; i < size; i++) number = number << 8 | bytes[little ? size - 1 - i : i];
    return number;
}
static uint64_t head(Work *w, const Path *path) { /* the number, count or length at the front of a value, in its shortest form */
    uint8_t first = *take(w, 1, path);
    if (first < 0x80) return first;
    if (first < 0xa0) return first & 0x0f;
    if (first < 0xc0) return first & 0x1f;
    if (first >= 0xd4 && first <= 0xd8) return UINT64_C(1) << (first - 0xd4);
    int size = first >= 0xdc ? 2 << (first & 1) : first >= 0xd9 ? 1 << (first - 0xd9) : first >= 0xcc ? 1 << (first - 0xcc) : 1 << (first - (first < 0xc7 ? 0xc4 : 0xc7));
    uint64_t number = number_of(take(w, (uint64_t)size, path), size, false), least = UINT64_C(1) << 4 * size;
    if (size == 1) least = first == 0xcc ? 0x80 : first == 0xd9 ? 32 : 0;
    if (size == 2 && first >= 0xdc) least = 16;
    bool ext = first >= 0xc7 && first <= 0xc9 && number <= 16 && number && !(number & (number - 1));
    if (number < least || ext) refuse(w, KVP_E_NOT_CANONICAL, path);
    return number;
}
static void take_signed(Work *w, const Path *path) {
    uint8_t first = *take(w, 1, path);
    if (first >= 0xe0) return;
    int size = 1 << (first - 0xd0);
    uint64_t number = number_of(take(w, (uint64_t)size, path), size, false);
    /* the shortest form of what is below 0, and no form of what is not */
    uint64_t least = size == 1 ? 0xe0 : UINT64_C(0) - (UINT64_C(1) << (4 * size - 1));
    uint64_t wide = size == 8 ? number : number | (number >> (8 * size - 1) ? ~UINT64_C(0) << 8 * size : 0);
    if (size == 1) least = ~UINT64_C(0) - 31;
    if (!(wide >> 63) || wide >= least) refuse(w, KVP_E_NOT_CANONICAL, path);
}
static size_t counted(Work *w, int kind, const Path *path) {
    uint64_t count = head(w, path);
    if (count > limit_of(kind)) refuse(w, KVP_E_TOO_LARGE, path);
    if (kind == MAP || kind == LIST) {
        if (count > w->values) refuse(w, KVP_E_TOO_LARGE, path);
        w->values -= count;
    }
    if (count * (kind == MAP ? 2 : 1) > left(w)) refuse(w, KVP_E_TRUNCATED, path);
    return (size_t)count;
}
static bool is_utf8(const uint8_t *s, size_t size) {
    for (size_t i = 0; i < size;) {
        uint8_t c = s[i];
        size_t more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : 9;
        if (more > size - i - 1) return false;
        for (size_t n = 1; n <= more; n++)
            if ((s[i + n] & 0xc0) != 0x80) return false;
        if ((c == 0xe0 && s[i + 1] < 0xa0) || (c == 0xed && s[i + 1] > 0x9f) || (c == 0xf0 && s[i + 1] < 0x90) || (c == 0xf4 && s[i + 1] > 0x8f)) return false;
        i += more + 1;
    }
    return true;
}
static kvp_value text_here(Work *w, const Path *path) {
    size_t size = counted(w, TEXT, path);
    const uint8_t *bytes = take(w, size, path);
    if (!is_utf8(bytes, size)) refuse(w, KVP_E_BAD_TEXT, path);
    return (kvp_value){.kind = TEXT, .bytes = (const char *)bytes, .count = size};
}

/* ---- arrays: little-endian numbers, as wide as the greatest needs ---- */

static bool is_little(void) { return *(const uint8_t *)&(const uint16_t){1} == 1; }
/* Each width has its own loop, by eights, which compilers make wide; returns all bits that occur. */
#define SPREAD(type)                                                           \
    for (; i + 8 <= count; i += 8) {                                           \
        type some[8];                                                          \
        memcpy(some, raw + i * sizeof(type), sizeof some);                     \
        for (int k = 0; k < 8; k++) all |= numbers[i + (size_t)k] = some[k];   \
    }
static uint64_t spread(const uint8_t *raw, size_t count, int width, uint64_t *numbers) {
    uint64_t all = 0;
    size_t i = 0;
    if (is_little()) {
        if (width == 1) SPREAD(uint8_t)
        else if (width == 2) SPREAD(uint16_t)
        else if (width == 4) SPREAD(uint32_t)
        else SPREAD(uint64_t)
    }
    for (; i < count; i++) all |= numbers[i] = number_of(raw + i * (size_t)width, width, true);
    return all;
}
static kvp_value array_here(Work *w, int widest, const Path *path) { /* widest 0: everything may occur, and is left out */
    uint64_t size = head(w, path);
    int ext = *take(w, 1, path), width = 1 << ((ext - 1) & 3);
    bool negative = ext > 4;
    if (ext < 1 || ext > 8 || (widest && (negative || width > widest))) refuse(w, KVP_E_BAD_TYPE, path);
    if (size % (uint64_t)width) refuse(w, KVP_E_BAD_LENGTH, path);
    if (size / (uint64_t)width > KVP_MAX_ARRAY) refuse(w, KVP_E_TOO_LARGE, path);
    const uint8_t *raw = take(w, size, path);
    kvp_value array = {.kind = ARRAY, .count = (size_t)size / (size_t)width};
    uint64_t half = UINT64_C(1) << 4 * width, bias = half >> 1, mask = width == 8 ? ~UINT64_C(0) : (UINT64_C(1) << 8 * width) - 1;
    bool narrower = width > 1 && array.count;
    if (widest) {
        uint64_t *numbers = room_for(w, array.count, sizeof *numbers);
        array.numbers = numbers;
        narrower = spread(raw, array.count, width, numbers) < half && narrower;
    } else
        for (size_t i = 0; i < array.count && narrower; i++) {
            uint64_t number = number_of(raw + i * (size_t)width, width, true);
            narrower = (negative ? (number + bias) & mask : number) < half;
        }
    if (narrower || (!array.count && ext != 1)) refuse(w, KVP_E_NOT_CANONICAL, path);
    return array;
}

/* ---- maps ---- */

static void not_deeper(Work *w, int depth, const Path *path) {
    if (depth > KVP_MAX_DEPTH) refuse(w, KVP_E_TOO_DEEP, path);
}
static uint64_t id_here(Work *w, const Path *path) {
    int kind = kind_here(w, path);
    if (kind == SIGNED) take_signed(w, path);
    if (kind != UINT) refuse(w, KVP_E_BAD_TYPE, path);
    return head(w, path);
}
static void check_id(Work *w, uint64_t id, uint64_t before, const Path *path) {
    if (id <= before) refuse(w, KVP_E_FIELD_ORDER, path);
    if (id > LAST_ID) refuse(w, KVP_E_OUT_OF_RANGE, path);
}
static void skip(Work *w, int depth, const Path *path) {
    int kind = kind_here(w, path);
    switch (kind) {
        case UINT: head(w, path); break;
        case SIGNED: take_signed(w, path); break;
        case BOOL: take(w, 1, path); break;
        case TEXT: text_here(w, path); break;
        case BYTES: take(w, counted(w, BYTES, path), path); break;
        case ARRAY: array_here(w, 0, path); break;
        case LIST:
        case MAP: {
            not_deeper(w, depth, path);
            uint64_t before = 0;
            for (size_t n = counted(w, kind, path); n; n--) {
                if (kind == MAP) {
                    uint64_t id = id_here(w, path);
                    check_id(w, id, before, path);
                    before = id;
                }
                skip(w, depth + 1, path);
            }
            break;
        }
        default: refuse(w, KVP_E_BAD_TYPE, path);
    }
}
static void check_rules(Work *w, const Layout *layout, const kvp_value *map, const Path *path);
static kvp_value value_here(Work *w, const Type *type, int depth, const Path *path);
static kvp_value empty_map(Work *w, const Layout *layout, kvp_value **fields) {
    *fields = get(w, (size_t)layout->count, sizeof(kvp_value));
    return (kvp_value){.kind = MAP, .layout = layout->number, .count = (size_t)layout->count, .items = *fields};
}
static void check_required(Work *w, const Layout *layout, const kvp_value *map, const Path *path) {
    for (int i = 0; i < layout->count; i++)
        if (layout->fields[i].required && !map->items[i].kind) refuse(w, KVP_E_MISSING_FIELD, &(Path){path, layout->fields[i].name, 0});
}
static kvp_value map_here(Work *w, const Layout *layout, int depth, const Path *path) {
    not_deeper(w, depth, path);
    if (kind_here(w, path) != MAP) refuse(w, KVP_E_BAD_TYPE, path);
    kvp_value *fields, map = empty_map(w, layout, &fields);
    uint64_t before = 0;
    for (size_t n = counted(w, MAP, path); n; n--) {
        uint64_t id = id_here(w, path);
        int i = 0;
        while (i < layout->count && layout->fields[i].id != id) i++;
        char unknown[24];
        if (i == layout->count) snprintf(unknown, sizeof unknown, "#%04llx", (unsigned long long)id);
        Path here = {path, i < layout->count ? layout->fields[i].name : unknown, 0};
        check_id(w, id, before, &here);
        before = id;
        if (i < layout->count) fields[i] = value_here(w, &layout->fields[i].type, depth + 1, &here);
        else if (id < MAY_IGNORE) refuse(w, KVP_E_UNKNOWN_FIELD, &here);
        else skip(w, depth + 1, &here);
    }
    check_required(w, layout, &map, path);
    check_rules(w, layout, &map, path);
    return map;
}
static kvp_value value_here(Work *w, const Type *type, int depth, const Path *path) {
    int kind = kind_here(w, path);
    if (kind == SIGNED && (type->kind == UINT || type->kind == ENUM)) take_signed(w, path);
    if (kind != (type->kind == ENUM ? UINT : type->kind)) refuse(w, KVP_E_BAD_TYPE, path);
    kvp_value value = {.kind = (uint32_t)type->kind};
    switch (type->kind) {
        case MAP: return map_here(w, &LAYOUTS[type->ref], depth, path);
        case BOOL: value.number = *take(w, 1, path) == 0xc3; return value;
        case TEXT: value = text_here(w, path); within(w, type, value.count, path); return value;
        case BYTES:
            value.count = counted(w, BYTES, path);
            value.bytes = (const char *)take(w, value.count, path);
            within(w, type, value.count, path);
            return value;
        case ARRAY: value = array_here(w, type->of->ref, path); within(w, type, value.count, path); return value;
        case LIST: {
            not_deeper(w, depth, path);
            value.count = counted(w, LIST, path);
            within(w, type, value.count, path);
            kvp_value *items = room_for(w, value.count, sizeof *items);
            value.items = items;
            for (size_t i = 0; i < value.count; i++) items[i] = value_here(w, type->of, depth + 1, &(Path){path, NULL, i});
            return value;
        }
        default: value.number = head(w, path);
    }
    const Enum *open = type->kind == ENUM ? &ENUMS[type->ref] : NULL;
    if (open && !name_of(open, value.number) && value.number <= 0xffff && !open->open) refuse(w, KVP_E_UNKNOWN_ENUM_VALUE, path);
    within(w, type, value.number, path);
    return value;
}
static kvp_value body(Work *w, const Layout *layout, const uint8_t *bytes, size_t size) {
    w->data = bytes;
    w->at = 0;
    w->end = size;
    w->values = layout->type ? KVP_MAX_VALUES : KVP_MAX_BODY;
    if (size > KVP_MAX_BODY) refuse(w, KVP_E_TOO_LARGE, NULL);
    kvp_value map = map_here(w, layout, 1, NULL);
    if (left(w)) refuse(w, KVP_E_TRAILING_BYTES, NULL);
    return map;
}
static const Layout *layout_of_type(unsigned type) {
    for (int i = 0; i < COUNT(LAYOUTS); i++)
        if (LAYOUTS[i].type && LAYOUTS[i].type == type) return &LAYOUTS[i];
    return NULL;
}
static const Layout *envelope(Work *w, const uint8_t *frame, size_t size) {
    if (memcmp(frame, "KVPW", size < 4 ? size : 4)) refuse(w, KVP_E_BAD_MAGIC, &(Path){NULL, "@magic", 0});
    Path length = {NULL, "@length", 0}, major = {NULL, "@major", 0};
    if (size < HEADER) refuse(w, KVP_E_TRUNCATED, &length);
    if (frame[4] != 0 && frame[4] != KVP_MAJOR) refuse(w, KVP_E_UNSUPPORTED_VERSION, &major);
    const Layout *layout = layout_of_type((unsigned)number_of(frame + 6, 2, true));
    if (!layout) refuse(w, KVP_E_UNKNOWN_MESSAGE, &(Path){NULL, "@type", 0});
    if (frame[4] != (layout->frozen ? 0 : KVP_MAJOR)) refuse(w, KVP_E_UNSUPPORTED_VERSION, &major);
    if (frame[8]) refuse(w, KVP_E_UNKNOWN_FLAG, &(Path){NULL, "@flags", 0});
    uint64_t stated = number_of(frame + 12, 4, true);
    if (stated > KVP_MAX_BODY) refuse(w, KVP_E_TOO_LARGE, &length);
    if (stated != size - HEADER) refuse(w, stated > size - HEADER ? KVP_E_TRUNCATED : KVP_E_TRAILING_BYTES, &length);
    return layout;
}
