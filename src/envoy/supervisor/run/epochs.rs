//! Envoy's processes: one per epoch, started, reported when they end, killed together.

use std::time::Duration;

use tokio::time::Instant;

use super::surviving::After;
use super::{Epoch, Run, SOON, executing, judging};
use crate::envoy::drain::{self, Phase};
use crate::envoy::process::{self, Exit, Written};
use crate::envoy::restart::{self, Kind};
use crate::envoy::supervisor::RunState;
use crate::envoy::supervisor::inputs::Ready;
use crate::envoy::{command, shared};
use crate::net::own::Own;
use crate::trouble::What;

impl Run {
    pub(super) fn carry_out(&mut self, action: restart::Action) -> bool {
        match action {
            restart::Action::None => false,
            restart::Action::Start(epoch) => {
                self.start(epoch);
                false
            }
            restart::Action::KillAll => {
                tracing::warn!("the other epochs of Envoy are killed for a fresh start");
                self.kill_all();
                let waiting = self.pending.take().map(|p| p.epoch).or(self.starting.take().map(|s| s.epoch));
                self.live = None;
                waiting.is_some_and(|epoch| {
                    self.gave_up(epoch, "the one before it ended");
                    let action = self.core.ended(epoch, Kind::Aborted, Duration::ZERO);
                    self.carry_out(action)
                })
            }
            restart::Action::RetryIn(delay) => {
                tracing::warn!("Envoy is restarted in {delay:?} ({})", self.core.left());
                let _ = self.state.send(RunState::Recovering);
                // It starts with the configuration of that moment.
                self.reload_again = None;
                self.retry_at = Some(Instant::now() + delay);
                false
            }
            restart::Action::AgainIn(delay) => {
                tracing::warn!("Envoy goes on as it is; its next epoch is tried again in {delay:?}");
                self.retry_at = Some(Instant::now() + delay);
                false
            }
            restart::Action::End => self.tell(drain::Event::Gone),
        }
    }

    /// Starts an epoch: at once where its file is there, else when its inputs were looked at and it is written.
    pub(super) fn start(&mut self, epoch: u32) {
        // Its file is where the new one goes; most often it is gone already.
        (self.suspect, self.judging) = (None, None);
        match self.envoy.file.take() {
            Some(file) if epoch == 0 => {
                self.launch(epoch, Ready { file: Some(file), base_id: None, program: None })
            }
            _ => self.prepare(epoch),
        }
    }

    pub(super) fn launch(&mut self, epoch: u32, Ready { file, base_id, program }: Ready) {
        self.envoy.program = program.unwrap_or(self.envoy.program);
        self.stand_guard();
        let config = &self.envoy.config;
        let base_id_path = self.envoy.base_id_path();
        if epoch == 0 {
            self.base_id = None;
        } else if self.base_id.is_none() {
            self.base_id = base_id;
        }
        let number = command::Epoch {
            number: epoch,
            base_id: self.base_id,
            base_id_path: &base_id_path,
            parent_shutdown_seconds: config.restart.parent_shutdown.as_secs(),
            alone: epoch > 0 && self.epochs.is_empty(),
        };
        let args = command::arguments(
            &self.envoy.path(epoch),
            &config.arguments,
            config.restart.hot_restart.then_some(&number),
        );
        let shown: Vec<_> = args.iter().map(|a| a.to_string_lossy()).collect();
        tracing::info!("Envoy command: [{}]", shown.join(" "));
        let spec = process::Spec {
            launcher: &config.launcher,
            binary: &config.binary,
            args: &args,
            extra_env: &config.extra_env,
            user: config.user,
            own_group: config.own_group,
            guarded: self.guard.is_some(),
        };
        let tell = |pid| {
            if let Some(guard) = &mut self.guard {
                guard.watch(pid);
            }
        };
        match process::spawn(&spec, tell) {
            Ok(process::Started { process, end, executed }) => {
                if self.epochs.is_empty() {
                    self.asked.takes_the_place();
                }
                self.ends.push(Box::pin(async move { (epoch, end.await) }));
                self.executing.push(Box::pin(executing::begun(process, executed)));
                let started = Instant::now();
                self.epochs.insert(
                    epoch,
                    Epoch {
                        process: Some(process),
                        _own: Some(Own::process(process.id())),
                        file,
                        args: args.clone(),
                        started,
                        aborted: false,
                    },
                );
                self.trouble.note(What::Started, format!("Envoy, epoch {epoch}"));
                self.settled_at = self.trouble.kind().map(|_| started + SOON);
                let _ = self.state.send(RunState::Running { epoch });
                self.prove(epoch);
                if self.machine.is_drained() {
                    self.drain_again(epoch);
                }
            }
            Err(error) => {
                let launcher = config.launcher.display().to_string();
                drop(file);
                self.not_started(epoch, format!("{launcher}: {error}"));
            }
        }
    }

    // Its end comes the same way as that of any other.
    pub(super) fn not_started(&mut self, epoch: u32, why: String) {
        let started = Instant::now();
        self.epochs.insert(
            epoch,
            Epoch { process: None, _own: None, file: None, args: Vec::new(), started, aborted: false },
        );
        self.ends.push(Box::pin(std::future::ready((epoch, Exit::NotStarted(why)))));
    }

    pub(super) fn kill_all(&mut self) {
        for epoch in self.epochs.values_mut() {
            epoch.aborted = true;
            if let Some(process) = epoch.process {
                process.kill();
            }
        }
    }

    pub(super) async fn ended(&mut self, number: u32, exit: Exit) -> bool {
        let Some(mut epoch) = self.epochs.remove(&number) else { return false };
        let gave_up = self.gave_up(number, &exit.to_string());
        // Not Envoy has ended, but a trial.
        if gave_up {
            epoch.aborted = true;
            // The next epoch of this number has a file of the same name.
            gone(&mut epoch.file).await;
        }
        if epoch.process.is_some() {
            self.end_orphans(!epoch.aborted).await;
        }
        if let (Some(guard), Some(process)) = (&mut self.guard, epoch.process) {
            guard.release(process.id());
        }
        let successor = self.epochs.keys().next_back().is_none_or(|other| *other > number);
        let left = self.tidy(number);
        let uninitialised = left == Some(true);
        // Or never came to attach to what it shares with the others: those serve, and have the admin port.
        let took_over = !successor
            && !epoch.aborted
            && left == Some(false)
            && self.had_admin
            && epoch.process.is_some()
            && !matches!(exit, Exit::NotStarted(_));
        if successor || took_over {
            self.asked.takes_the_place();
        }
        if let Some(pending) = self.pending.as_mut().filter(|_| self.epochs.is_empty()) {
            // Nothing is left to wait for.
            pending.next_check = Instant::now();
        }
        let ran = epoch.started.elapsed();
        if !exit.orderly() || self.epochs.is_empty() {
            self.settled_at = None;
        }
        let running = self.machine.phase() == Phase::Running;
        self.report(number, &exit, epoch.aborted, ran);
        // What an earlier one has found does not hold for this one.
        self.taken = None;
        if running && !exit.orderly() && ran < SOON && self.epochs.is_empty() {
            self.taken = self.port_taken(&exit, number).await;
        }
        if !epoch.aborted {
            self.acquit().await;
        }
        if running && !epoch.aborted && !exit.orderly() {
            self.trouble.report(self.crash(&exit, ran));
            if self.taken.is_none() && ran < SOON && matches!(exit, Exit::Status(_)) {
                self.suspect = judging::Suspect::of(self.envoy.program, epoch.args, &mut epoch.file);
            }
        }
        gone(&mut epoch.file).await;
        let kind = match &exit {
            _ if epoch.aborted => Kind::Aborted,
            exit if exit.orderly() => Kind::Orderly,
            // To recover means to have one that serves, and there is one.
            _ if uninitialised && self.envoy.config.restart.recovery => Kind::NotStarted,
            exit if exit.killed() => Kind::Memory,
            Exit::NotStarted(_) => Kind::NotStarted,
            _ => Kind::Abnormal,
        };
        self.aborted = epoch.aborted;
        if !(epoch.aborted && self.last.is_some()) {
            self.last = Some((exit, ran));
        }
        if !running {
            return self.epochs.is_empty() && self.tell(drain::Event::Gone);
        }
        let action = self.core.ended(number, kind, ran);
        let after = match () {
            () if gave_up => Some(After::Trial),
            () if took_over => Some(After::TakeOver),
            () => None,
        };
        self.follow(action, after).await
    }

    // `after`: what the others are asked for, if they live on.
    async fn follow(&mut self, action: restart::Action, after: Option<After>) -> bool {
        if matches!(action, restart::Action::Start(_) | restart::Action::RetryIn(_)) {
            self.acquit().await;
        }
        let over = self.carry_out(action);
        if matches!(action, restart::Action::None | restart::Action::AgainIn(_)) && !self.epochs.is_empty() {
            self.live_on();
        }
        match after {
            Some(After::Trial) if !over && !self.epochs.is_empty() => {
                self.core.settle();
                self.ask_survivor(After::Trial);
            }
            Some(After::TakeOver) if action == restart::Action::None => self.ask_survivor(After::TakeOver),
            _ => {}
        }
        over
    }

    // The others do, without the one that has ended.
    fn live_on(&mut self) {
        self.judge_beside();
        let newest = self.epochs.keys().next_back().map(|epoch| RunState::Running { epoch: *epoch });
        self.state.send_if_modified(|state| {
            let changes = newest.as_ref().is_some_and(|newest| newest != state);
            if let Some(newest) = newest.filter(|_| changes) {
                *state = newest;
            }
            changes
        });
    }

    // What the newest epoch has left would keep the next one from starting beside those that serve. Gives whether that one was
    // not initialised yet, if that can be told.
    fn tidy(&self, number: u32) -> Option<bool> {
        let newest = self.epochs.keys().next_back().is_some_and(|other| *other < number);
        let id = self.base_id.filter(|_| newest && self.envoy.config.restart.hot_restart)?;
        match shared::clear(&shared::path(id)) {
            Ok(true) => {
                tracing::info!("epoch {number} was not initialised yet; the next one can start");
                Some(true)
            }
            Ok(false) => Some(false),
            Err(error) => {
                tracing::warn!("cannot tell whether epoch {number} blocks the next one: {error}");
                None
            }
        }
    }
}

async fn gone(file: &mut Option<Written>) {
    if let Some(file) = file.take() {
        file.remove().await;
    }
}
