/* The memory that a sink registers: what of a Register is refused, in the order of its table, and how shared memory is mapped; from registration.md. Included by push.c. */
#include "serve.c"

enum { MAX_REGIONS = 1024 };

static _Noreturn void deny_at(const char *error, const char *format, size_t i, const char *name, long k, const char *mine, const char *yours) { /* list[i].name[k] */
    static char path[128];
    int size = snprintf(path, sizeof path, format, i);
    if (name) size += snprintf(path + size, sizeof path - (size_t)size, ".%s", name);
    if (k >= 0) snprintf(path + size, sizeof path - (size_t)size, "[%ld]", k);
    deny(error, path, mine, yours);
}
static const kvp_value *region_with(const kvp_value *regions, uint64_t id) {
    for (size_t i = 0; i < regions->count; i++)
        if (kvp_number(&regions->items[i], KVP_REGION_ID) == id) return &regions->items[i];
    return NULL;
}

/* ---- columns: one of each group, an entry of each layer and part ---- */

static uint64_t farther(uint64_t reach, uint64_t stride, uint64_t steps) { return steps && stride > (UINT64_MAX - reach) / steps ? UINT64_MAX : reach + stride * steps; } /* no more than 64 bits say */
static void check_entry(const kvp_value *columns, size_t i, size_t k, const Group *group, const Share *share, uint64_t length) {
    static const char *const names[3] = {"item_stride", "row_stride", "lane_stride"};
    static const int fields[3] = {KVP_COLUMNS_ITEM_STRIDE, KVP_COLUMNS_ROW_STRIDE, KVP_COLUMNS_LANE_STRIDE};
    const Part *part = &group->parts[k % group->count];
    uint64_t lanes = 0, extents[3] = {kvp_number(columns, KVP_COLUMNS_ITEMS), group->rows, 0}, strides[3], offset = field(columns, KVP_COLUMNS_OFFSET).numbers[k];
    int order[3] = {0, 1, 2};
    for (size_t n = 0; n < share->count; n++)
        if (share->spans[n].part == k % group->count) lanes += share->spans[n].hi - share->spans[n].lo;
    extents[2] = lanes;
    for (int n = 0; n < 3; n++) strides[n] = field(columns, fields[n]).numbers[k];
    for (int a = 0; a < 3; a++)
        for (int b = a + 1; b < 3; b++)
            if (strides[order[b]] < strides[order[a]]) {
                int other = order[a];
                order[a] = order[b];
                order[b] = other;
            }
    uint64_t reach = part->bytes, inner = reach; /* inner: without the greatest stride */
    const char *greatest = "offset";
    for (int n = 0; n < 3; n++) {
        int axis = order[n];
        if (extents[axis] < 2) continue; /* never used */
        if (strides[axis] > length) deny_at("OUT_OF_REGION", "columns[%zu]", i, names[axis], (long)k, "a stride within the region", "a longer one");
        if (strides[axis] < reach) deny_at("BAD_COLUMNS", "columns[%zu]", i, names[axis], (long)k, "a stride of no less than what it strides over", "less");
        inner = reach;
        reach = farther(reach, strides[axis], extents[axis] - 1);
        greatest = names[axis];
    }
    if (offset > length || inner > length - offset) deny_at("OUT_OF_REGION", "columns[%zu]", i, "offset", (long)k, "an offset within the region", "beyond it");
    if (reach > length - offset) deny_at("OUT_OF_REGION", "columns[%zu]", i, greatest, (long)k, "items that end within the region", "beyond it");
}
static void check_columns(const Session *session, const kvp_value *map) {
    static const char *const arrays[] = {"region", "offset", "item_stride", "row_stride", "lane_stride"};
    static const int fields[] = {KVP_COLUMNS_REGION, KVP_COLUMNS_OFFSET, KVP_COLUMNS_ITEM_STRIDE, KVP_COLUMNS_ROW_STRIDE, KVP_COLUMNS_LANE_STRIDE};
    kvp_value columns = field(map, KVP_REGISTER_COLUMNS), regions = field(map, KVP_REGISTER_REGIONS);
    const Rank *mine = session->sink->end.mine;
    size_t count = 0;
    for (size_t i = 0; mine && i < mine->count; i++) {
        if (mine->shares[i].group->kind == HANDOFF) continue;
        if (count >= columns.count || kvp_number(&columns.items[count], KVP_COLUMNS_GROUP) != mine->shares[i].id) deny("BAD_COLUMNS", "columns", "the groups that the rank owns", "others");
        count++;
    }
    if (count != columns.count) deny("BAD_COLUMNS", "columns", "the groups that the rank owns", "more");
    for (size_t i = 0, s = 0; i < count; i++, s++) {
        while (mine->shares[s].group->kind == HANDOFF) s++;
        const Share *share = &mine->shares[s];
        size_t entries = share->layers.count * share->group->count;
        for (int a = 0; a < COUNT(arrays); a++)
            if (field(&columns.items[i], fields[a]).count != entries) deny_at("BAD_COLUMNS", "columns[%zu]", i, arrays[a], -1, "an entry for each layer and part", "another number");
        kvp_value region = field(&columns.items[i], KVP_COLUMNS_REGION);
        for (size_t k = 0; k < entries; k++)
            if (!region_with(&regions, region.numbers[k])) deny_at("BAD_COLUMNS", "columns[%zu]", i, "region", (long)k, "a region of this Register", "none");
        for (size_t k = 0; k < entries; k++) check_entry(&columns.items[i], i, k, share->group, share, kvp_number(region_with(&regions, region.numbers[k]), KVP_REGION_LENGTH));
    }
}

static const kvp_value *of_group(const kvp_value *list, uint64_t group) { /* of Columns or Grants, both of which begin with their group */
    for (size_t i = 0; i < list->count; i++)
        if (list->items[i].items[0].number == group) return &list->items[i];
    refuse("BAD_GRANT", "");
}

/* ---- regions ---- */

static const kvp_value *handle_known(const kvp_value *region) { /* the first handle by which this engine can reach it */
    kvp_value handles = field(region, KVP_REGION_HANDLES), boot = field(region, KVP_REGION_BOOT);
    uint8_t here[16];
    this_boot(here);
    for (size_t i = 0; i < handles.count; i++) {
        const char *name = kvp_value_name(KVP_ENUM_TRANSPORT, kvp_number(&handles.items[i], KVP_HANDLE_TRANSPORT));
        if (name && !strcmp(name, "SHM") && pool.shared && kvp_number(region, KVP_REGION_KIND) == 1 && !memcmp(boot.bytes, here, 16)) return &handles.items[i];
        if (name && !strcmp(name, "INLINE") && !pool.shared) return &handles.items[i];
    }
    return NULL;
}
typedef struct { const uint8_t *at, *end; } Bytes;
static bool take_uint(Bytes *from, uint64_t *number) { /* of msgpack, in its shortest form */
    if (from->at == from->end) return false;
    uint8_t first = *from->at++;
    *number = first;
    if (first < 0x80) return true;
    int size = 1 << (first - 0xcc);
    if (first < 0xcc || first > 0xcf || from->end - from->at < size) return false;
    *number = 0;
    for (int i = 0; i < size; i++) *number = *number << 8 | *from->at++;
    return size == 1 ? *number >= 0x80 : *number >> 4 * size;
}
static bool read_handle(const kvp_value *handle, uint64_t *pid, uint64_t *descriptor, char nonce[33], uint64_t *attestations) { /* an array of PID, descriptor, nonce and descriptor */
    kvp_value data = field(handle, KVP_HANDLE_DATA);
    Bytes from = {(const uint8_t *)data.bytes, (const uint8_t *)data.bytes + data.count};
    if (from.at == from.end || *from.at++ != 0x94 || !take_uint(&from, pid) || !take_uint(&from, descriptor)) return false;
    if (from.end - from.at < 34 || from.at[0] != 0xd9 || from.at[1] != 32) return false;
    for (int i = 0; i < 32; i++)
        if (!from.at[2 + i] || !strchr("0123456789abcdef", from.at[2 + i])) return false;
    memcpy(nonce, from.at + 2, 32);
    nonce[32] = 0;
    from.at += 34;
    return take_uint(&from, attestations) && from.at == from.end;
}
static bool attested(uint64_t pid, uint64_t descriptor, const Text *attestation) { /* by the process itself, which alone can write there (KVP-REG-ATTEST) */
    char path[64], link[128] = "", row[32];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)pid, (unsigned long long)descriptor);
    if (readlink(path, link, sizeof link - 1) < 0 || strcmp(link, "/memfd:kvproto-attestations (deleted)")) return false;
    FILE *file = fopen(path, "r");
    for (int n = 0; file && n < 65536 && !found && fread(row, sizeof row, 1, file); n++) found = !memcmp(row, attestation->text, sizeof row);
    if (file) fclose(file);
    return found;
}
static const char *map_region(const kvp_value *region, const kvp_value *handle, const Text *attestation, Mapped *mapped) { /* what is wrong, below the region's path; NULL where nothing is */
    uint64_t pid, descriptor, attestations, length = kvp_number(region, KVP_REGION_LENGTH);
    char nonce[33], path[64], wanted[64], link[128] = "";
    if (!read_handle(handle, &pid, &descriptor, nonce, &attestations) || pid > INT32_MAX || descriptor > INT32_MAX) return "handles";
    if (!attested(pid, attestations, attestation)) return "handles";
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)pid, (unsigned long long)descriptor);
    snprintf(wanted, sizeof wanted, "/memfd:kvproto-%s (deleted)", nonce);
    if (readlink(path, link, sizeof link - 1) < 0 || strcmp(link, wanted)) return "handles";
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return "handles";
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);
    const char *wrong = fstat(fd, &about) || seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) ? "handles" : (uint64_t)about.st_size < length ? "length" : NULL;
    if (!wrong) {
        void *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (bytes == MAP_FAILED) wrong = "handles";
        else *mapped = (Mapped){kvp_number(region, KVP_REGION_ID), length, bytes};
    }
    close(fd);
    return wrong;
}
static void map_regions(Session *session, const kvp_value *regions) {
    Sink *sink = session->sink;
    bool known = false;
    for (size_t i = 0; i < regions->count; i++) known |= handle_known(&regions->items[i]) != NULL;
    if (!known) deny("NO_TRANSPORT", "regions[0].handles", pool.shared ? "SHM, on this host" : "INLINE", "others");
    sink->regions = calloc(regions->count + 1, sizeof *sink->regions);
    if (!sink->regions) abort();
    Text attestation = attestation_of(session->id, 1, me.name, 0, 0, sink->engine, sink->replica, session->rank);
    for (size_t i = 0; i < regions->count; i++) {
        const kvp_value *handle = handle_known(&regions->items[i]);
        const char *wrong = !handle ? "handles" : pool.shared ? map_region(&regions->items[i], handle, &attestation, &sink->regions[sink->region_count]) : NULL;
        if (!wrong) {
            sink->region_count += pool.shared;
            continue;
        }
        free(attestation.text);
        for (size_t n = 0; n < sink->region_count; n++) munmap(sink->regions[n].bytes, sink->regions[n].length);
        free(sink->regions);
        sink->regions = NULL;
        sink->region_count = 0;
        deny_at("TRANSPORT_FAILED", "regions[%zu]", i, wrong, -1, "memory that can be mapped", "none");
    }
    free(attestation.text);
}

/* ---- Register ---- */

static void check_routes(const Session *session, const kvp_value *map) {
    kvp_value stated = field(map, KVP_REGISTER_ROUTES), plan = field(map, KVP_REGISTER_PLAN);
    size_t count, n = 0;
    const kvp_route *routes = kvp_plan_routes(session->plan, &count);
    for (size_t i = 0; i < count; i++) {
        if (!routed(session, (size_t)(routes[i].boxes - session->box))) continue;
        const kvp_value *each = n < stated.count ? &stated.items[n] : NULL;
        bool alike = each && kvp_number(each, KVP_ROUTE_REF_GROUP) == routes[i].group && !memcmp(kvp_field(each, KVP_ROUTE_REF_DIGEST)->bytes, routes[i].digest, 32);
        if (!alike) deny_at("ROUTE_MISMATCH", "routes[%zu]", n, NULL, -1, "the routes of both Descriptions", "others");
        n++;
    }
    if (n != stated.count) deny_at("ROUTE_MISMATCH", "routes[%zu]", n, NULL, -1, "the routes of both Descriptions", "others");
    if (memcmp(plan.bytes, kvp_plan_digest(session->plan), 32)) deny("ROUTE_MISMATCH", "plan", "the plan of both Descriptions", "another");
}
static void send_registered(Session *session) {
    Text json = {0};
    uint64_t start;
    uint8_t boot[16];
    this_boot(boot);
    form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\", \"epoch\": \"%llu\", \"transport\": \"%s\", ", (unsigned long long)session->id, (unsigned long long)session->sink->registered,
        (unsigned long long)session->sink->epoch, pool.shared ? "SHM" : "INLINE");
    form_routes(&json, session);
    if (pool.shared && pid_namespace() && start_of((uint64_t)getpid(), &start)) {
        form(&json, ", \"process\": {\"boot\": \"");
        form_hex(&json, boot, 16);
        form(&json, "\", \"namespace\": \"%llu\", \"pid\": \"%lld\", \"start\": \"%llu\"}", (unsigned long long)pid_namespace(), (long long)getpid(), (unsigned long long)start);
    }
    form(&json, "}");
    notice(session, KVP_REGISTERED, json.text);
    free(json.text);
}
static void register_memory(Session *session, const kvp_value *map) {
    uint64_t request = kvp_number(map, KVP_REGISTER_REQUEST);
    Sink *sink = session->sink;
    kvp_value source = field(map, KVP_REGISTER_SOURCE), theirs = field(map, KVP_REGISTER_SINK), regions = field(map, KVP_REGISTER_REGIONS), columns = field(map, KVP_REGISTER_COLUMNS);
    if (session->state == READY && request == sink->registered) {
        send_registered(session);
        return;
    }
    if (session->state == READY) deny("UNEXPECTED_MESSAGE", "epoch", "one Register", "another");
    if (session->state != DESCRIBED) deny("UNEXPECTED_MESSAGE", "", "both Descriptions first", "Register");
    if (memcmp(source.bytes, me.digest, 32)) deny("DESCRIPTION_MISMATCH", "source", "this source's digest", "another");
    if (memcmp(theirs.bytes, session->digest, 32)) deny("DESCRIPTION_MISMATCH", "sink", "the digest of Describe", "another");
    if (kvp_number(map, KVP_REGISTER_ACCESS) != 1) deny("NO_TRANSPORT", "access", "WRITE", "READ");
    check_routes(session, map);
    if (regions.count > MAX_REGIONS) deny("TOO_LARGE", "regions", "1024", "more");
    check_columns(session, map);
    map_regions(session, &regions);
    sink->end.columns = columns;
    sink->epoch = kvp_number(map, KVP_REGISTER_EPOCH);
    sink->registered = request;
    session->state = READY;
    keep(&session->memory);
    send_registered(session);
}
