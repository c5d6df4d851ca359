/* One prefill rank hands a request over to two decode ranks: the plan, its digest, and the copies from the prefill rank to decode rank 1. */
#include <inttypes.h>
#include <kvproto.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, HEADS = 8, HEAD_BYTES = 256, PAGE = 16, POOL = 64 };
typedef struct { int field; uint64_t number; } Pair;

static void set(kvp_message *m, kvp_value *map, const Pair *pairs) { /* up to field 0 */
    for (; pairs->field; pairs++) kvp_set_number(m, map, pairs->field, pairs->number);
}
static void check(int code, const kvp_error *error) {
    if (code) fprintf(stderr, "%s at %s: %s, not %s\n", kvp_code_name(code), error->path, error->mine, error->yours), exit(1);
}
static kvp_description *engine(unsigned ranks) { /* k and v of some layers, whose heads are divided among ranks */
    kvp_message *m = kvp_message_new(KVP_GEOMETRY, NULL);
    kvp_value *root = kvp_fill(m), *group = kvp_add_map(m, root, KVP_GEOMETRY_GROUPS);
    kvp_set_number(m, root, KVP_GEOMETRY_REPLICA, 0);
    kvp_set_list(m, root, KVP_GEOMETRY_FACTS);
    kvp_set_bytes(m, group, KVP_GROUP_NAME, "kv", 2);
    set(m, group, (const Pair[]){{KVP_GROUP_ID, 0}, {KVP_GROUP_MODEL, 0}, {KVP_GROUP_KIND, KVP_ITEM_KIND_PAGE}, {KVP_GROUP_ROWS, PAGE}, {KVP_GROUP_TOKENS_PER_ROW, 1},
        {KVP_GROUP_CP_SIZE, 1}, {KVP_GROUP_INTERLEAVE, 1}, {KVP_GROUP_ORIGIN, 0}, {0, 0}});
    for (int p = 0; p < 2; p++) {
        kvp_value *part = kvp_add_map(m, group, KVP_GROUP_PARTS);
        kvp_set_bytes(m, part, KVP_PART_NAME, p ? "v" : "k", 1);
        set(m, part, (const Pair[]){{KVP_PART_DTYPE, KVP_DTYPE_BF16}, {KVP_PART_LANES, HEADS}, {KVP_PART_LANE_BYTES, HEAD_BYTES}, {0, 0}});
    }
    for (unsigned r = 0; r < ranks; r++) {
        kvp_value *rank = kvp_add_map(m, root, KVP_GEOMETRY_RANKS), *owns = kvp_add_map(m, rank, KVP_RANK_OWNS);
        kvp_set_number(m, rank, KVP_RANK_RANK, r);
        set(m, owns, (const Pair[]){{KVP_OWNS_GROUP, 0}, {KVP_OWNS_CP_RANK, 0}, {0, 0}});
        kvp_set_numbers(m, owns, KVP_OWNS_LAYERS, (const uint64_t[]){0, 1}, LAYERS);
        for (unsigned p = 0; p < 2; p++)
            set(m, kvp_add_map(m, owns, KVP_OWNS_LANES), (const Pair[]){{KVP_LANE_SPAN_PART, p}, {KVP_LANE_SPAN_LO, HEADS * r / ranks}, {KVP_LANE_SPAN_HI, HEADS * (r + 1) / ranks}, {0, 0}});
    }
    kvp_description *description;
    kvp_error error;
    check(kvp_describe_message(m, NULL, &description, &error), &error);
    kvp_message_free(m);
    return description;
}
/* Layers and parts lie as [page, row, head, byte] in region 0; 40 tokens of the request lie in three pages. */
static kvp_end memory(const kvp_description *of, uint64_t rank, uint64_t heads, const uint64_t *pages, kvp_message *reg, kvp_message *transfer) {
    kvp_value *columns = kvp_add_map(reg, kvp_fill(reg), KVP_REGISTER_COLUMNS), *grants = kvp_add_map(transfer, kvp_fill(transfer), KVP_TRANSFER_GRANTS);
    uint64_t lane = HEAD_BYTES, row = heads * lane, item = PAGE * row, places[5][2 * LAYERS];
    for (unsigned i = 0; i < 2 * LAYERS; i++) places[0][i] = 0, places[1][i] = i * POOL * item, places[2][i] = item, places[3][i] = row, places[4][i] = lane;
    for (int i = 0; i < 5; i++) kvp_set_numbers(reg, columns, KVP_COLUMNS_REGION + i, places[i], 2 * LAYERS);
    set(reg, columns, (const Pair[]){{KVP_COLUMNS_GROUP, 0}, {KVP_COLUMNS_ITEMS, POOL}, {0, 0}});
    set(transfer, grants, (const Pair[]){{KVP_GRANTS_GROUP, 0}, {KVP_GRANTS_FIRST, 0}, {KVP_GRANTS_COUNT, 40}, {KVP_GRANTS_VALID, 40}, {0, 0}});
    kvp_set_numbers(transfer, grants, KVP_GRANTS_ITEMS, pages, 3);
    return (kvp_end){.description = of, .rank = rank, .columns = kvp_field(kvp_root(reg), KVP_REGISTER_COLUMNS), .windows = kvp_field(kvp_root(transfer), KVP_TRANSFER_GRANTS)};
}
int main(void) {
    kvp_description *prefill = engine(1), *decode = engine(2);
    kvp_message *messages[4] = {kvp_message_new(KVP_REGISTER, NULL), kvp_message_new(KVP_TRANSFER, NULL), kvp_message_new(KVP_REGISTER, NULL), kvp_message_new(KVP_TRANSFER, NULL)};
    const kvp_end source = memory(prefill, 0, HEADS, (const uint64_t[]){7, 3, 9}, messages[0], messages[1]), sink = memory(decode, 1, HEADS / 2, (const uint64_t[]){0, 1, 5}, messages[2], messages[3]);
    kvp_plan *plan;
    kvp_program *program;
    kvp_error error;
    size_t count;
    check(kvp_plan_new(prefill, decode, 0, NULL, &plan, &error), &error); /* both sides compute it, and compare its digest */
    for (int i = 0; i < 32; i++) printf("%02x", kvp_plan_digest(plan)[i]);
    check(kvp_lower(plan, &source, &sink, NULL, &program, &error), &error);
    const kvp_copy *copies = kvp_program_copies(program, &count);
    printf("\n%zu copies of %" PRIu64 " bytes in all; the first: %" PRIu64 " bytes from %" PRIu64 " to %" PRIu64 "\n", count, kvp_program_bytes(program), copies->bytes, copies->source_offset, copies->sink_offset);
    kvp_program_free(program);
    kvp_plan_free(plan);
    for (int i = 0; i < 4; i++) kvp_message_free(messages[i]);
    kvp_description_free(prefill);
    kvp_description_free(decode);
    return 0;
}
