"""What `hybridop <command> --help` answers; `{groups}` stands for the choices of the shipped configuration."""

FIT = """\
usage: hybridop fit [name=value ...] [--multirun] [--show]

Fine-tunes a language model with LoRA over the stages of a plan, in local processes that it starts itself or in those
of torchrun, and writes adapter/, checkpoints/, metrics.csv, plan.yaml, timeline.png, timeline.json, summary.json and
config.yaml to one folder.

choices of each group (name=choice):
{groups}

often used options (name=value; --show prints all):
  strategy.queries=<Q>              perturbations per micro-batch on zo stages
  strategy.exit_queries=<Q'>        further perturbations that leave at the last zo stage
  strategy.micro_batches=<M>        slices of a mini-batch
  strategy.estimator=<name>         loss, boundary or adjoint: how zo stages learn
  strategy.directions=<whose>       microbatch, minibatch or row: what draws directions of its own
  strategy.epsilon=<size>           size of a perturbation
  cluster.zo_role=frozen            zo stages only compute: what the others learn by themselves
  plan=<file>                       a plan file in the place of cluster and the options above
  plan=auto                         measure every process, then lay the blocks out by speed and memory
  use_all=true                      of a cluster with devices, leave none out
  model.learning_rate=<rate>        of Adam; strategy.zo_lr_scale multiplies it on zo stages
  model.name=<hub id or folder>     another model, with model=hf
  data.train=<file> data.test=<file>    files of data=agnews, multirc or squad
  data.held_out_rows=<rows>         rows that scores are measured on (of data=multirc: data.held_out_questions)
  strategy.data=broadcast           rank 0 reads the data, the others receive its mini-batches
  trainer.max_steps=<steps>         length of the run
  folder=<folder>                   where everything is written; by default outputs/<date>/<time>-<recipe>
  port=<port>                       on which the processes find each other; by default a free one
  debug=true                        stack traces of errors

flags:
  --multirun, -m    one run for each combination of values given as name=a,b
  --show            print the configuration and stop
  --help, -h        this text

examples:
  hybridop fit recipe=quickstart
  hybridop fit recipe=quickstart plan=auto
  hybridop fit recipe=quickstart strategy.queries=4 trainer.max_steps=20
  hybridop fit recipe=agnews_smollm2 cluster.zo_role=frozen
  hybridop fit recipe=multirc_smollm2 data.train=train.jsonl data.test=val.jsonl
  hybridop fit recipe=squad_smollm2 data.train=train-v1.1.json
  hybridop fit recipe=quickstart cluster=local_1bp
  hybridop fit recipe=emulated_3b
  hybridop fit recipe=quickstart strategy.queries=1,4 --multirun
  torchrun --nproc-per-node 4 -m lightning_hybridop fit recipe=quickstart

The overrides are Hydra's: lists, groups (+group=choice), new keys (+key=value) and removals (~key) work as there.
"""

LAUNCH = """\
usage: hybridop launch [hosts=<file>] [name=value ...]

Prints what to start on each host of a hosts file, one torchrun command for each, or starts them over ssh, shows what they
say behind the names of their hosts, and ends all when one fails. All other options are those of `hybridop fit`.

choices of each group (name=choice):
{groups}

options (name=value; --show prints all):
  hosts=<file>                      a hosts file; conf/cluster/lan.yaml shows what is in one
  start=true                        start the commands over ssh, without a password (BatchMode)
  command=doctor                    run `hybridop doctor` on all hosts in the place of `fit`
  restarts=<number>                 how often a run that failed goes on from its latest checkpoint
  min_hosts=<number>                with fewer hosts than all a run goes on as long as so many are left
  port=<port>                       on which the hosts find each other, in the place of the hosts file's

examples:
  hybridop launch hosts=lan.yaml workload=smollm2_135m workload.dtype=float16 recipe=quickstart
  hybridop launch hosts=lan.yaml workload=smollm2_135m workload.dtype=float16 recipe=quickstart command=doctor start=true
  hybridop launch hosts=lan.yaml plan=auto start=true
"""

DOCTOR = """\
usage: hybridop doctor [name=value ...]

Tries everything that `hybridop fit` with the same options needs, and prints a table of what was found, each fault with
its remedy. Alone it looks at this host; under torchrun or `hybridop launch command=doctor` it meets the other processes,
compares what they run and measures the links between them. The exit code is 0 if a run would start.

choices of each group (name=choice):
{groups}

examples:
  hybridop doctor recipe=quickstart
  hybridop launch hosts=lan.yaml workload=smollm2_135m recipe=quickstart command=doctor start=true
  torchrun --nnodes 2 --nproc-per-node 1 ... -m lightning_hybridop doctor recipe=quickstart cluster=local_1zo_1bp
"""

_CHOICES = """\
choices of each group (name=choice):
{groups}

options (name=value; --show prints all):
"""

_PLAN_OPTIONS = """\
  micro_batches=<M>               slices of a mini-batch; null takes the best
  queries=<Q>                     perturbations per micro-batch; auto: as many as fit into idle time
  exit_queries=<Q'>               further perturbations that leave at the last zo stage; auto: likewise
  estimator=loss|boundary|adjoint    how zo stages learn: differences of the loss; the gradient that the first bp stage
                                  sends back, where perturbations end at the last zo stage; or exact gradients
  wire=bfloat16|float16|int8      how hidden states travel from stage to stage
  objective=makespan|paper        what is minimised: the estimated iteration time, or the published formula
  use_all=true                    leave no device out
"""

_COMMON = """\
  workload.rows=<rows> workload.length=<tokens>    the mini-batch
  cluster.efficiency=<share>      share of the vendor's rates that a model reaches
  cluster.link.bandwidth_mbit_s=<Mbit/s>    of the links
  folder=<folder>                 where files are written; by default outputs/<date>/<time>-{name}
  debug=true                      stack traces of errors
"""

PLAN = (
    """\
usage: hybridop plan [name=value ...] [--show]

Lays a model's blocks over the devices of a cluster, so that a mini-batch takes the least time, and says what it will
take. Writes plan.yaml (which `hybridop fit plan=<file>` and `hybridop simulate plan=<file>` read), stages.csv, plan.json
and timeline.png.

"""
    + _CHOICES
    + _PLAN_OPTIONS
    + _COMMON
    + """\

examples:
  hybridop plan cluster=paper_3b workload=llama3_2_3b queries=12
  hybridop plan cluster=paper_8b workload=llama3_1_8b queries=auto exit_queries=auto
  hybridop plan cluster=paper_3b workload=llama3_2_3b queries=12 estimator=boundary
  hybridop plan workload=smollm2_135m 'cluster.devices=[{{profile: measured/profile.yaml, count: 2}}]'
"""
)

SIMULATE = (
    """\
usage: hybridop simulate [name=value ...] [--html] [--show]

Runs one mini-batch of a plan in simulated time: when each device does what, how busy it is, what it holds in memory and
what energy it takes. Writes timeline.png, timeline.json (for Perfetto), devices.csv and simulation.json.

"""
    + _CHOICES
    + _PLAN_OPTIONS
    + _COMMON
    + """\
  objective=makespan|paper        what is minimised: the estimated iteration time, or the published formula
  use_all=true                    leave no device out
  plan=<file>                     a plan in the place of the planner's own and of M, Q and Q'
  schedule=hybridop|gpipe|1f1b    the order of the actions

flags:
  --html            also write simulation.html, one page with picture, table and every action under the pointer

examples:
  hybridop simulate cluster=paper_3b workload=llama3_2_3b queries=2 --html
  hybridop simulate plan=plan.yaml cluster=paper_3b workload=llama3_2_3b schedule=gpipe
"""
)

COMPARE = (
    """\
usage: hybridop compare [name=value ...] [--show]

Simulates one mini-batch of every method, with and without the forward-only devices: GPipe, 1F1B, Chimera, AccPar, HDP,
DAPPLE, Asteroid and HybridOP. Writes comparison.csv, comparison.json and comparison.png, one timeline per method.

"""
    + _CHOICES
    + """\
  micro_batches=<M>               slices of a mini-batch, the same for all methods
  queries=<Q>                     perturbations per micro-batch
  exit_queries=<Q'>               further perturbations that leave at the last zo stage
  estimator=loss|boundary|adjoint    how zo stages learn in HybridOP; the other two have a row each
  wire=bfloat16|float16|int8      how hidden states travel in HybridOP; all other methods send them as they are
"""
    + _COMMON
    + """\

examples:
  hybridop compare cluster=paper_3b workload=llama3_2_3b
  hybridop compare cluster=paper_8b workload=llama3_1_8b queries=20
"""
)

PROFILE = """\
usage: hybridop profile [name=value ...] [--show]

Measures how fast this machine runs one block, the embedding and the head of a model, forward and backward, and how much
memory a process can have. The result is kept in your cache folder; folder=<folder> writes it as a profile, which a
cluster can use: cluster.devices=[{{profile: <folder>/profile.yaml}}].

choices of each group (name=choice):
{groups}

options (name=value; --show prints all):
  rows=<rows> length=<tokens>     the micro-batch to measure with
  device=<device>                 cpu, cuda:0 or npu:0
  dtype=<dtype>                   float32, bfloat16 or float16
  processes=<n>                   also measure the links between so many processes of this host
  refresh=true                    measure again what the cache already has
  folder=<folder>                 also write the profile there

examples:
  hybridop profile model=smollm2
  hybridop profile model=smollm2 processes=2
"""

GRADIENTS = """\
usage: hybridop gradients [name=value ...] [--plot] [--show]

Compares what each estimator makes of one mini-batch with the true gradient of the zo stages: cosine and ratio of the
norms, over all zo stages and for each, and what it takes: forwards through the whole model, seconds of all stages' work,
bytes sent between stages. Runs in this process, and writes gradients.csv.

choices of each group (name=choice):
{groups}

options (name=value; --show prints all):
  queries=[1,3,12]                  numbers of perturbations to compare with
  strategy.micro_batches=<M>        slices of the mini-batch
  strategy.epsilon=<size>           size of a perturbation
  strategy.distribution=rademacher  directions of 1 and -1
  plan=<file>                       a plan file in the place of cluster
  warm_up=<steps>                   exact training steps before gradients are compared
  folder=<folder>                   where the files go

flags:
  --plot            also draw gradients.png, cosine against forward work

examples:
  hybridop gradients
  hybridop gradients data=agnews cluster=local_2zo_2bp queries=[3,12,48] --plot
"""

EXPORT = """\
usage: hybridop export [name=value ...] [--show]

Writes the blocks of a stage as ONNX: forward.onnx, adjoint.onnx (the gradients by the hidden state and by each adapter,
given that of the output), weights.bin that both read, and stage.json, which names every input and output with shape and
dtype. Adapters are inputs. The operators are those of ONNX's own domain, opset 17, for compilers such as Ascend's ATC.
Prints how often each type of operator occurs.

choices of each group (name=choice):
{groups}

options (name=value; --show prints all):
  first=<block> last=<block>      the blocks first to last - 1; by default all
  plan=<file> stage=<number>      the blocks of a plan's stage, counted from 0, in the place of these
  rows=<rows> length=<tokens>     the micro-batch: the graphs are for one shape
  dtype=<dtype>                   in which the frozen weights are kept: float32, bfloat16 or float16
  weights=int8                    keep them as int8, with one scale for each output channel
  model.lora_rank=<rank> model.lora_targets=[<projection>, ...]    the adapters
  folder=<folder>                 where files are written; by default outputs/<date>/<time>-{name}
  debug=true                      stack traces of errors

examples:
  hybridop export model=smollm2 last=15
  hybridop export model=smollm2 plan=plan.yaml stage=0 rows=2 length=128 weights=int8
"""

REBUILD = """\
usage: hybridop rebuild folder=<a run's folder> [name=value ...]

Takes the optimizer steps of forward-only stages since a checkpoint again, from the scalars in the run's scalars.log, and
writes their trained parameters to rebuilt.safetensors in that folder, under the names that they have in a checkpoint. No
model, no data and no other process is needed. Every checksum on the way is compared with what comes out.

options (name=value; --show prints all):
  folder=<folder>                 the run
  step=<step>                     the optimizer step to come to; by default the last one in the log
  checkpoint=<file>               where to begin; by default the run's latest checkpoint of that step or an earlier one
  debug=true                      stack traces of errors

examples:
  hybridop rebuild folder=outputs/2026-01-31/12-00-00-quickstart
  hybridop rebuild folder=run step=25 checkpoint=run/recovery/step-10.ckpt
"""
