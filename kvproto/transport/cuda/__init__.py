"""Transport `cuda`: GPUs of one host that can map each other's memory; one gather-scatter kernel, no torch.

The path of a copy is `transport` > `copier` > `kernel`, which writes the data that kernel.cu reads, and `driver`, which
launches it. `memory` maps allocations of peers, by `descriptors` if they are virtual. `pager` copies pages between a
GPU and the host (`kvproto.tiers`), `stream` cuts packed streams into chunks (transport `nixl`), and `order` orders
copies with the work of a framework.
"""
