"""Values of tensors of other stages, which a step function reads by no operator."""
import re

from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Readers(Case):
    _STEP = """
    import copy, io, pickle
    begin(pipeline=PIPELINE)
    class Two(Mlp):
        def forward(self, x):
            early = self.layers[:4](x)
            return early, self.layers[4:](early)
    net, batches, seen = Two(0.1), mlp_batches(), []
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    @smp.step
    def train_step(x, y):
        early, logits = model(x)
        loss = F.cross_entropy(logits, y)
        READS
        model.backward(loss)
        return loss
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        losses = train_step(x, y)
        found.append([[loss.item() for loss in losses.outputs], gradients(model)])
        optimizer.step()
    of_ranks = [json.loads(text) for text in smp.state.world.gather(json.dumps(seen))]
    result = [found, weights(model), of_ranks]
"""
    _READS = {
        "tolist": "seen.append([early.tolist(), loss.tolist(), logits[0].detach().tolist()])",
        "numpy": "seen.append([early.detach().numpy().tolist(), float(__import__('numpy').asarray(loss.detach())), told(lambda: loss.numpy())])",
        "text": "seen.append([repr(early), str(loss.detach()), f'{loss:.4f}', f'{logits}'])",
        "pickle": "kept = io.BytesIO(); torch.save([early.detach(), loss.detach()], kept); kept.seek(0); seen.append([one.tolist() for one in torch.load(kept)])",
        "copy": "seen.append([copy.deepcopy(loss.detach()).item(), told(lambda: copy.deepcopy(loss)), type(copy.deepcopy(net.layers[7].weight)).__name__, "
                "copy.deepcopy(net.layers[7].weight).sum().item(), copy.deepcopy(net.layers[0]).bias.tolist()])",
        "a branch": "loss = loss * 2 if max(early.flatten().tolist()) > 0.5 or 'nan' in str(loss) else loss; seen.append(early.max().tolist())",
    }

    def test_every_rank_reads_what_one_process_does(self):
        for name, reads in self._READS.items():
            for pipeline in ("interleaved", "sequential"):
                with self.subTest(name, pipeline=pipeline):
                    text = self._STEP.replace("READS", reads).replace("PIPELINE", repr(pipeline))
                    (losses, ends, alone), found = self.ran(1, text), self.ran(2, text)
                    self.assertEqual(found[:2], [losses, ends])
                    self.assertEqual(len(alone[0]), 8)
                    for own in found[2]:
                        self.assertEqual(self._without_graphs(own), self._without_graphs(alone[0]))

    def _without_graphs(self, seen):
        """Texts of tensors name the function that made them on one process."""
        return [[re.sub(r",\s+grad_fn=<\w+>", "", one) if isinstance(one, str) else one for one in entry] if isinstance(entry, list) else entry for entry in seen]


if __name__ == "__main__":
    main()
